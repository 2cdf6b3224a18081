"""Estimate the memory of a graph that is not chunked.

AOTAutograd's partitioners build the forward and backward graphs that would run without this backend. If these fit
into the memory budget, or take less memory than the loops, they run instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import fx

from streamfx.budget import budget_bytes
from streamfx.cost.memory import Cost, bytes_of_values, cost_of
from streamfx.errors import describe_error
from streamfx.fallbacks import NOT_BOUNDED, try_step
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts
from streamfx.ir.joint import JointGraph, descendants, device_of, outputs_of
from streamfx.log import log
from streamfx.node_meta import RECOMPUTE
from streamfx.options import Options
from streamfx.passes.ops.aliasing import memories, memories_made
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.ops.traits import is_expensive
from streamfx.passes.partition.budget_search import held_bytes
from streamfx.passes.partition.chunk_sizes import gradient_bytes

Halves: TypeAlias = "tuple[fx.GraphModule, fx.GraphModule | None]"
TOLERATED = 1.02  # factor on the bytes of the unchunked graph: its loops may take up to this much
LEAST = 1 << 20  # bytes: smaller steps are not compared, which would lengthen every first step
CLOSE = 1.2  # the search for the longest lengths at which it is smaller stops within this factor
LEAVES_OPEN: dict[str, Any] = {
    **dict.fromkeys(("chunk_size", "loss_chunk_size", "save", "keep_every"), "auto"),
    "offload": "none",
    "memory_budget": None,
    "adjoints": "exact",
    "strict": False,
}


@dataclass(frozen=True)
class UnchunkedGraph:
    """Forward and backward graphs without loops, the cost of a step, and the lengths for which they are smaller."""

    halves: Halves
    cost: Cost
    lengths: Lengths | None = None


def may_fit_whole(joint: JointGraph, budget: int | float | str) -> bool:
    """Return whether the forward values that the backward graph reads fit into the budget.

    If not, no partitioner has to run. Counts each storage that the forward graph certainly allocates once. If the
    user's code asks for recomputation, the kept values are not known yet.
    """
    return try_step(partial(_saved_values_fit, joint, budget), True, NOT_BOUNDED, strict=False)


def _saved_values_fit(joint: JointGraph, budget: int | float | str) -> bool:
    """Return whether the values that the forward graph saves leave room in the budget; see `may_fit_whole`."""
    if any(RECOMPUTE in node.meta for node in joint.graph.nodes):
        return True
    input_bytes = held_bytes(joint.graph, joint.tangents)
    available = budget_bytes(budget, device_of(joint.graph), input_bytes, gradient_bytes(joint.gradients)) - input_bytes
    saved_memories = (
        memories(node) for node in joint.forward if node.op == "call_function" and not joint.forward.issuperset(node.users)
    )
    return (
        bytes_of_values(node for memory in saved_memories if len(memory) == 1 for node in memory if node.op == "call_function")
        <= available
    )


def fits_whole(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, budget: int | float | str, others: int = 0
) -> bool:
    """Return whether AOTAutograd's forward and backward graphs stay within the budget without chunks.

    They keep all values that the backward graph reads, which is more than Inductor keeps of the same graph.
    `others` are bytes of outputs that the graphs do not compute.
    """
    held, gradients = held_bytes(forward.graph), outputs_of(backward.graph)
    left = budget_bytes(budget, device_of(forward.graph), held, gradient_bytes(gradients)) - held - others
    try:
        return cost_of(forward, backward, num_outputs).peak <= left
    except Exception as error:  # an operator that only a tracer can run
        log.info("not known whether the graph fits as it stands: %s", error)
        return False


def may_stand(facts: Facts, options: Options) -> bool:
    """Return whether the graph may run unchunked if that takes less memory: no option asks for loops, no other rank
    has to agree, and its values are large enough for a comparison.
    """
    asks = any(getattr(options, name) != value for name, value in LEAVES_OPEN.items())
    return not asks and not has_collectives(facts.joint.graph) and bytes_of_values(facts.joint.nodes) >= LEAST


def is_compared(peak: int) -> bool:
    """Return whether a step is large enough to compare alternatives."""
    return peak >= LEAST


def smaller_than(
    ours: Cost | None, facts: Facts, traced: JointGraph, ways: Iterable[Callable[[], Halves]]
) -> UnchunkedGraph | None:
    """Return the smallest of several unchunked variants of a `traced` graph if it takes less memory than its loops,
    which cost `ours` (less than the first variant, if there are no loops). Return None if it does not, or would not
    for longer inputs.
    """
    num_outputs, program = len(facts.joint.outputs), facts.program
    if ours is not None and (not is_compared(ours.peak) or bytes_at_least(traced) >= ours.peak):
        return None
    variants = [variant for make in ways if (variant := _with_cost(make, num_outputs)) is not None]
    least = min((variant.cost.peak for variant in variants), default=0)
    least_held = sorted((each for each in variants if each.cost.peak <= TOLERATED * least), key=lambda each: each.cost.held)
    if not variants or not _is_less(least, least_held[0].cost, variants[0].cost if ours is None else ours):
        return None
    variant, other_halves = least_held[0], variants[0].halves if program is None else (program.forward, program.backward)
    holds_for: list[bool] = []

    def holds(lengths: Lengths) -> bool:
        """Record and return whether the unchunked variant is still smaller for the lengths being tried."""
        holds_for.append(cost_of(*variant.halves, num_outputs).peak <= TOLERATED * cost_of(*other_halves, num_outputs).peak)
        return holds_for[-1]

    lengths = Lengths.of_current_call(facts.joint.graph).longest_if_longer(holds, CLOSE)
    if lengths is None and all(holds_for):  # no call has more of every size, as with slices that add up to a fixed number
        lengths = Lengths({})
    return None if lengths is None else replace(variant, lengths=lengths)


def _is_less(least: int, candidate: Cost, baseline: Cost) -> bool:
    """Return whether `least`, about the peak of one, is below the other's peak by more than the tolerance; or
    whether one has no higher peak, and keeps less between forward and backward, while other graphs of the step run.
    """
    return least * TOLERATED < baseline.peak or (candidate.peak <= baseline.peak and candidate.held * TOLERATED < baseline.held)


def _with_cost(make: Callable[[], Halves], num_outputs: int) -> UnchunkedGraph | None:
    """Build an unchunked variant and return it with its cost; None if it cannot be traced."""
    try:
        halves = make()
        return UnchunkedGraph(halves, cost_of(*halves, num_outputs))
    except Exception as error:  # an operator that only a tracer can run
        log.info("not known what the graph takes as it stands: %s", describe_error(error))
        return None


def bytes_at_least(joint: JointGraph) -> int:
    """Return the bytes that are alive at once without chunks, however the graph is fused and recomputed.

    A product reads its operands from memory and writes its result there. No partitioner recomputes a product, unless
    the user's code asks for it: results that a backward operator reads are kept until their last use. Gradients live
    until the end.
    """
    nodes = joint.nodes
    products = (node for node in nodes if is_expensive(node))
    together = (bytes_of_values({node, *memories_made(node.all_input_nodes)}) for node in products)
    return max(*together, *_alive_in_backward(joint, nodes), 0)


def _alive_in_backward(joint: JointGraph, nodes: list[fx.Node]) -> Iterator[int]:
    """Yield the bytes of kept products and of gradients, after each backward operator."""
    on_gradients = descendants(joint.tangents, nodes)
    backward = [node for node in nodes if node in on_gradients]  # the mask of `clamp` may run in the forward graph
    last_use = {source: node for node in backward for source in memories_made(node.all_input_nodes) if source in joint.forward}
    last_use = {source: node for source, node in last_use.items() if is_expensive(source) and RECOMPUTE not in source.meta}
    freed_after, alive = Counter[fx.Node](), bytes_of_values(last_use)
    for source, node in last_use.items():
        freed_after[node] += bytes_of_values((source,))
    gradients = memories_made(node for node in joint.gradients if isinstance(node, fx.Node)) - joint.forward
    yield alive
    for node in backward:
        alive += bytes_of_values(gradients & {node})
        yield alive
        alive -= freed_after[node]
