"""Warnings, each once: a step with much work saves no memory (it runs as it stood, or takes no less than with checkpoints); what
it writes is lost; this version of PyTorch is not tested.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from streamfx.budget import in_bytes
from streamfx.cost.flops import flops_of_graph
from streamfx.cost.memory import bytes_like, bytes_of_values
from streamfx.errors import told
from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_parameter, is_tensor
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import Options
from streamfx.passes.ops.aliasing import memories_made
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.partition.chunk_sizes import gradient_bytes
from streamfx.tools.report.fallback_reasons import why_no_stages
from streamfx.tools.report.notices import predicted
from streamfx.tools.report.stage_table import source_lines
from streamfx.tools.report.stage_titles import unnumbered
from streamfx.torch_private.dynamo import lost_writes
from streamfx.torch_private.versions import untested

MUCH_WORK = 10**11  # FLOPs of a graph: with less, nobody misses the loops
MORE = "streamfx.explain shows more"
WHOLE_GRAPH = (
    "a graph of {flops:.1e} FLOPs is run without streaming: {why}. The result is exact, the memory is that of plain autograd. "
    f"{MORE}."
)
NO_GAIN = (
    "a graph of {flops:.1e} FLOPs streams, and saves nothing: {ours} are predicted at the peak for activations and gradients, "
    "and gradient checkpointing takes about {other}. Most of it are gradients, or what runs whole, or the sequence is short: "
    f"{MORE}."
)


LOST = (
    "{line}: this write is lost under torch.compile, whatever the backend: AOTAutograd takes a tensor of no dimensions in "
    "float64 on the CPU for a number. Give it a dimension (torch.zeros(1, dtype=torch.float64)), or another type"
)


def tell_of_untested_torch() -> None:
    """Say that the tests never ran on this version of PyTorch."""
    if text := untested():
        _tell_once(untested, text)


def tell_of_lost_writes(graph: fx.Graph) -> None:
    """Say which lines write to what AOTAutograd does not write back."""
    for line in lost_writes(graph):
        _tell_once((LOST, line), LOST.format(line=line or "a write in place"))


def tell_of_no_gain(facts: Facts, options: Options) -> None:
    """Say of a training step's graph with much work that no memory is saved, once for each reason and model, whatever the length.

    Within a memory budget more is taken on purpose. What other ranks hold is not counted, so of their graphs only those are told
    of that do not stream at all. What cannot be told must not keep a graph from being compiled.
    """
    if facts.failed:  # which was said
        return
    flops = flops_of_graph(facts.joint.graph)
    if flops < MUCH_WORK:
        return
    if facts.program is None:
        why = why_no_stages(facts)
        _tell_once((unnumbered(why), _code(facts)), WHOLE_GRAPH.format(flops=float(flops), why=why))
    elif options.memory_budget is None and not has_collectives(facts.joint.graph):
        try:
            ours, other = predicted(facts).peak, checkpointing_bytes(facts)
        except Exception as error:
            log.info("not known whether a graph saves memory: %s", told(error))
            return
        if ours >= other:
            _tell_once((NO_GAIN, _code(facts)), NO_GAIN.format(flops=float(flops), ours=in_bytes(ours), other=in_bytes(other)))


def checkpointing_bytes(facts: Facts) -> int:
    """About the most bytes that are alive where each stage is a checkpoint, all gradients included: what stages hand on, and what
    one of them makes for its backward stretch, with the largest gradient there.
    """
    joint, kept, peak = facts.joint, set[fx.Node](), 0
    gradients = gradient_bytes(joint.gradients)
    for stage in facts.stages:
        own = memories_made(node for node in stage.forward if any(user not in joint.forward for user in node.users))
        work = max((bytes_like(node.meta[VALUE]) for node in stage.backward if is_tensor(node)), default=0)
        peak = max(peak, bytes_of_values(kept | own) + work)
        kept |= memories_made(stage.outputs)
    return peak + gradients


_told: set[Hashable] = set()


def _tell_once(about: Hashable, text: str) -> None:
    if about not in _told:
        _told.add(about)
        log.warning("%s", text)


def _code(facts: Facts) -> Hashable:
    """What a graph has in common with that of the same model at another length: lines of code, and the kinds of its weights."""
    weights = (primal.meta[VALUE] for primal in facts.joint.primals if is_parameter(primal))
    return source_lines(facts.joint.nodes), tuple((value.dtype, tuple(value.shape)) for value in weights)
