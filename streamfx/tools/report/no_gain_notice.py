"""Warnings, each logged once.

They report that a step with much work saves no memory (because it is not chunked, or because checkpointing takes no more), that
a write is lost, or that this version of PyTorch is untested.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from streamfx.budget import format_bytes
from streamfx.cost.flops import flops_of_graph
from streamfx.cost.memory import bytes_like, bytes_of_values
from streamfx.errors import describe_error
from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_parameter, is_tensor
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import Options
from streamfx.passes.ops.aliasing import computed_memories
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.partition.chunk_sizes import gradient_bytes
from streamfx.tools.report.fallback_reasons import why_no_stages
from streamfx.tools.report.notices import MORE, predicted
from streamfx.tools.report.stage_table import source_lines
from streamfx.tools.report.stage_titles import unnumbered
from streamfx.torch_private.dropped_writes import dropped_writes
from streamfx.torch_private.versions import untested

MIN_FLOPS = 10**11  # FLOPs of a graph: below this, a missed optimization does not matter
UNCHUNKED = (
    "a graph of {flops:.1e} FLOPs runs unchunked: {why}. The result is exact, and takes as much memory as plain autograd. "
    f"{MORE}."
)
NO_GAIN = (
    "a graph of {flops:.1e} FLOPs streams without saving memory: predicted peak {ours} for activations and gradients, gradient "
    "checkpointing takes about {other}. Gradients or fallbacks take most of it, or the sequence is short: "
    f"{MORE}."
)


LOST_WRITE = (
    "{line}: this write is lost under torch.compile with any backend: AOTAutograd treats a float64 scalar tensor on the CPU as "
    "a Python number. Give it a dimension (torch.zeros(1, dtype=torch.float64)), or another dtype"
)


def warn_if_torch_untested() -> None:
    """Warn if the tests have never run on this version of PyTorch."""
    if text := untested():
        _warn_once(untested, text)


def warn_about_lost_writes(graph: fx.Graph) -> None:
    """Warn about source lines whose writes AOTAutograd does not write back."""
    for line in dropped_writes(graph):
        _warn_once((LOST_WRITE, line), LOST_WRITE.format(line=line or "a write in place"))


def warn_if_no_gain(facts: Facts, options: Options) -> None:
    """Warn if a training graph with much work saves no memory, once per reason and model, whatever the sequence length.

    Within a memory budget, using more memory is deliberate. Memory on other ranks is not counted, so a graph with collectives
    is reported only if none of it streams. An error while predicting costs must not keep a graph from being compiled.
    """
    if facts.analysis_error:  # already reported
        return
    flops = flops_of_graph(facts.joint.graph)
    if flops < MIN_FLOPS:
        return
    if facts.program is None:
        why = why_no_stages(facts)
        _warn_once((unnumbered(why), _model_key(facts)), UNCHUNKED.format(flops=float(flops), why=why))
    elif options.memory_budget is None and not has_collectives(facts.joint.graph):
        try:
            ours, other = predicted(facts).peak, checkpointing_bytes(facts)
        except Exception as error:
            log.info("it is unknown whether a graph saves memory: %s", describe_error(error))
            return
        if ours >= other:
            _warn_once(
                (NO_GAIN, _model_key(facts)),
                NO_GAIN.format(flops=float(flops), ours=format_bytes(ours), other=format_bytes(other)),
            )


def checkpointing_bytes(facts: Facts) -> int:
    """Estimate the peak bytes, gradients included, if each stage is checkpointed.

    This counts the values between stages, and the values that one stage recomputes for its backward graph plus the largest
    gradient there.
    """
    joint, saved, peak = facts.joint, set[fx.Node](), 0
    gradients = gradient_bytes(joint.gradients)
    for stage in facts.stages:
        recomputed = computed_memories(node for node in stage.forward if any(user not in joint.forward for user in node.users))
        work = max((bytes_like(node.meta[VALUE]) for node in stage.backward if is_tensor(node)), default=0)
        peak = max(peak, bytes_of_values(saved | recomputed) + work)
        saved |= computed_memories(stage.outputs)
    return peak + gradients


_warned: set[Hashable] = set()


def _warn_once(key: Hashable, text: str) -> None:
    """Log a warning unless one with this key was logged before."""
    if key not in _warned:
        _warned.add(key)
        log.warning("%s", text)


def _model_key(facts: Facts) -> Hashable:
    """Return a key that a graph shares with graphs of the same model at other lengths: source lines and weight types."""
    weights = (primal.meta[VALUE] for primal in facts.joint.primals if is_parameter(primal))
    return source_lines(facts.joint.nodes), tuple((value.dtype, tuple(value.shape)) for value in weights)
