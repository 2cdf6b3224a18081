"""Estimate the memory of a graph that runs unchunked.

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
from streamfx.passes.ops.aliasing import computed_memories, memories
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.ops.traits import is_expensive
from streamfx.passes.partition.budget_search import held_bytes
from streamfx.passes.partition.chunk_sizes import gradient_bytes

GraphPair: TypeAlias = "tuple[fx.GraphModule, fx.GraphModule | None]"
TOLERANCE = 1.02  # factor on the peak of the unchunked graph up to which the loops run anyway
MIN_COMPARED_BYTES = 1 << 20  # smaller steps are not compared, because that takes time in every first step
LENGTH_PRECISION = 1.2  # the search for the longest lengths at which the unchunked graph is smaller stops within this factor
UNRESTRICTED_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("chunk_size", "loss_chunk_size", "save", "keep_every"), "auto"),
    "offload": "none",
    "memory_budget": None,
    "adjoints": "exact",
    "strict": False,
}


@dataclass(frozen=True)
class UnchunkedGraph:
    """Forward and backward graphs without loops, the cost of a step, and the lengths for which they take less memory."""

    graphs: GraphPair
    cost: Cost
    lengths: Lengths | None = None


def may_fit_unchunked(joint: JointGraph, budget: int | float | str) -> bool:
    """Return False if the forward values that the backward graph reads certainly exceed the budget.

    Then no partitioner has to run. Only memory that the forward graph certainly allocates counts. If the user's code
    requests recomputation, the kept values are not known: return True.
    """
    return try_step(partial(_saved_values_fit, joint, budget), True, NOT_BOUNDED, strict=False)


def _saved_values_fit(joint: JointGraph, budget: int | float | str) -> bool:
    """See `may_fit_unchunked`."""
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


def fits_unchunked(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, budget: int | float | str, others: int = 0
) -> bool:
    """Return whether AOTAutograd's forward and backward graphs fit into the budget without chunks.

    They keep all values that the backward graph reads, which is more than Inductor keeps for the same graph.
    `others` is the bytes of outputs that the graphs do not compute.
    """
    held, gradients = held_bytes(forward.graph), outputs_of(backward.graph)
    left = budget_bytes(budget, device_of(forward.graph), held, gradient_bytes(gradients)) - held - others
    try:
        return cost_of(forward, backward, num_outputs).peak <= left
    except Exception as error:  # an operator that only a tracer can run
        log.info("not known whether the graph fits unchunked: %s", error)
        return False


def may_run_unchunked(facts: Facts, options: Options) -> bool:
    """Return whether the graph may run unchunked if that takes less memory.

    No option may request loops, no other rank may have to agree, and the values must be large enough for a comparison.
    """
    requests_loops = any(getattr(options, name) != value for name, value in UNRESTRICTED_OPTIONS.items())
    return (
        not requests_loops and not has_collectives(facts.joint.graph) and bytes_of_values(facts.joint.nodes) >= MIN_COMPARED_BYTES
    )


def is_worth_comparing(peak: int) -> bool:
    """Return whether a step is so large that alternatives are compared."""
    return peak >= MIN_COMPARED_BYTES


def find_smaller_unchunked(
    ours: Cost | None, facts: Facts, traced: JointGraph, builders: Iterable[Callable[[], GraphPair]]
) -> UnchunkedGraph | None:
    """Return the smallest of several unchunked variants of a `traced` graph if it takes less memory than the loops.

    `ours` is the cost of the loops; if there are none, variants are compared with the first one. Return None if no variant
    is smaller, or not for longer inputs.
    """
    num_outputs, program = len(facts.joint.outputs), facts.program
    if ours is not None and (not is_worth_comparing(ours.peak) or min_live_bytes(traced) >= ours.peak):
        return None
    variants = [variant for make in builders if (variant := _with_cost(make, num_outputs)) is not None]
    min_peak = min((variant.cost.peak for variant in variants), default=0)
    smallest = [variant for variant in variants if variant.cost.peak <= TOLERANCE * min_peak]
    by_held_bytes = sorted(smallest, key=lambda variant: variant.cost.held)
    if not variants or not _is_less(min_peak, by_held_bytes[0].cost, variants[0].cost if ours is None else ours):
        return None
    variant = by_held_bytes[0]
    other_graphs = variants[0].graphs if program is None else (program.forward, program.backward)
    results: list[bool] = []

    def is_smaller(lengths: Lengths) -> bool:
        """Record and return whether the unchunked variant is smaller for these lengths, at which sizes are evaluated."""
        results.append(cost_of(*variant.graphs, num_outputs).peak <= TOLERANCE * cost_of(*other_graphs, num_outputs).peak)
        return results[-1]

    lengths = Lengths.of_current_call(facts.joint.graph).longest_if_longer(is_smaller, LENGTH_PRECISION)
    if lengths is None and all(results):  # no call has larger sizes only: slices that add up to a fixed length, for example
        lengths = Lengths({})
    return None if lengths is None else replace(variant, lengths=lengths)


def _is_less(min_peak: int, candidate: Cost, baseline: Cost) -> bool:
    """Return whether the candidate takes less memory than the baseline.

    Either its peak, about `min_peak`, is lower by more than the tolerance. Or its peak is not higher, and it holds less
    between forward and backward, while other graphs of the step run.
    """
    return min_peak * TOLERANCE < baseline.peak or (
        candidate.peak <= baseline.peak and candidate.held * TOLERANCE < baseline.held
    )


def _with_cost(make: Callable[[], GraphPair], num_outputs: int) -> UnchunkedGraph | None:
    """Return an unchunked variant with its cost; None if it cannot be traced."""
    try:
        graphs = make()
        return UnchunkedGraph(graphs, cost_of(*graphs, num_outputs))
    except Exception as error:  # an operator that only a tracer can run
        log.info("the memory of the unchunked graph is not known: %s", describe_error(error))
        return None


def min_live_bytes(joint: JointGraph) -> int:
    """Return a lower bound on the peak without chunks, for any fusion and recomputation.

    A product reads its operands from memory and writes its result to memory. No partitioner recomputes a product unless
    the user's code requests it, so results that a backward operator reads are kept until their last use. Gradients live
    until the end.
    """
    nodes = joint.nodes
    products = (node for node in nodes if is_expensive(node))
    operands_and_result = (bytes_of_values({node, *computed_memories(node.all_input_nodes)}) for node in products)
    return max(*operands_and_result, *_alive_in_backward(joint, nodes), 0)


def _alive_in_backward(joint: JointGraph, nodes: list[fx.Node]) -> Iterator[int]:
    """Yield the bytes of kept products and of gradients, after each backward operator."""
    dependent = descendants(joint.tangents, nodes)
    backward = [node for node in nodes if node in dependent]  # others, as the mask of `clamp`, may run in the forward graph
    last_use = {
        source: node for node in backward for source in computed_memories(node.all_input_nodes) if source in joint.forward
    }
    last_use = {source: node for source, node in last_use.items() if is_expensive(source) and RECOMPUTE not in source.meta}
    freed_after, alive = Counter[fx.Node](), bytes_of_values(last_use)
    for source, node in last_use.items():
        freed_after[node] += bytes_of_values((source,))
    gradients = computed_memories(node for node in joint.gradients if isinstance(node, fx.Node)) - joint.forward
    yield alive
    for node in backward:
        alive += bytes_of_values(gradients & {node})
        yield alive
        alive -= freed_after[node]
