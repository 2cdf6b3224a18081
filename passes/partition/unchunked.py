"""Estimate the memory of a graph that runs unchunked.

AOTAutograd's partitioners build the forward and backward graphs that would run without this backend. If these fit
into the memory budget, or take less memory than the loops, they run instead. An *unchunked variant* is one such pair of graphs;
*held* bytes are alive between forward and backward, and in inputs; the *peak* is the largest number of live bytes in a step.
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
from streamfx.passes.partition.chunk_sizes import gradient_bytes
from streamfx.passes.partition.plan_simulator import held_bytes

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
    """Forward and backward graphs without loops, the cost of a step, and the lengths for which they take less memory.

    `lengths`: the largest values of the dynamic sizes for which that holds; None before they are known.
    """

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
    """Return whether the forward values that backward operators read fit into the budget, each memory counted once.

    `memories` returns the nodes whose memory a value may be a view of. With several, it is not certain which one is kept. True
    if the user's code requests recomputation.
    """
    if any(RECOMPUTE in node.meta for node in joint.graph.nodes):
        return True
    input_bytes = held_bytes(joint.graph, joint.tangents)
    available = budget_bytes(budget, device_of(joint.graph), input_bytes, gradient_bytes(joint.gradients)) - input_bytes
    saved_values = (node for node in joint.forward if node.op == "call_function" and not joint.forward.issuperset(node.users))
    certain_memories = (memory for memory in map(memories, saved_values) if len(memory) == 1)
    saved_bytes = bytes_of_values(node for memory in certain_memories for node in memory if node.op == "call_function")
    return saved_bytes <= available


def fits_unchunked(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, budget: int | float | str, other_bytes: int = 0
) -> bool:
    """Return whether AOTAutograd's forward and backward graphs fit into the budget without chunks; False if not known.

    They keep all values that the backward graph reads, which is more than Inductor keeps for the same graph. `num_outputs`:
    the first results of `forward` are the outputs, the others are saved. `other_bytes`: of outputs that the graphs do not
    compute.
    """
    input_bytes, gradients = held_bytes(forward.graph), outputs_of(backward.graph)
    budget_in_bytes = budget_bytes(budget, device_of(forward.graph), input_bytes, gradient_bytes(gradients))
    try:
        return cost_of(forward, backward, num_outputs).peak <= budget_in_bytes - input_bytes - other_bytes
    except Exception as error:  # an operator that only a tracer can run
        log.info("not known whether the graph fits unchunked: %s", error)
        return False


def may_run_unchunked(facts: Facts, options: Options) -> bool:
    """Return whether the graph may run unchunked if that takes less memory than its loops.

    False if an option requests loops, if the graph has collectives (all ranks would have to decide alike), or if its values
    are too small for a comparison (1 MiB).
    """
    requests_loops = any(getattr(options, name) != value for name, value in UNRESTRICTED_OPTIONS.items())
    if requests_loops or has_collectives(facts.joint.graph):
        return False
    return bytes_of_values(facts.joint.nodes) >= MIN_COMPARED_BYTES


def is_worth_comparing(peak: int) -> bool:
    """Return whether the peak bytes of a step are so large (1 MiB) that alternatives are compared."""
    return peak >= MIN_COMPARED_BYTES


def find_smaller_unchunked(
    loop_cost: Cost | None, facts: Facts, traced: JointGraph, builders: Iterable[Callable[[], GraphPair]]
) -> UnchunkedGraph | None:
    """Return the smallest of several unchunked variants of a `traced` graph if it takes less memory than the loops.

    `loop_cost` is the cost of the loops; if None, there are no loops, and the first variant takes their place. `builders`
    each build a variant. Return None if no variant is smaller, or if that does not hold for longer inputs.
    """
    num_outputs, program = len(facts.joint.outputs), facts.program
    if loop_cost is not None and (not is_worth_comparing(loop_cost.peak) or min_live_bytes(traced) >= loop_cost.peak):
        return None
    variants = [variant for build in builders if (variant := _with_cost(build, num_outputs)) is not None]
    if not variants:
        return None
    min_peak = min(variant.cost.peak for variant in variants)
    smallest = [variant for variant in variants if variant.cost.peak <= TOLERANCE * min_peak]
    variant = min(smallest, key=lambda variant: variant.cost.held)
    if not _is_less(min_peak, variant.cost, variants[0].cost if loop_cost is None else loop_cost):
        return None
    baseline_graphs = variants[0].graphs if program is None else (program.forward, program.backward)
    results: list[bool] = []

    def is_smaller(lengths: Lengths) -> bool:
        """Record and return whether the unchunked variant is smaller; sizes evaluate to `lengths` during this call."""
        results.append(cost_of(*variant.graphs, num_outputs).peak <= TOLERANCE * cost_of(*baseline_graphs, num_outputs).peak)
        return results[-1]

    lengths = Lengths.of_current_call(facts.joint.graph).longest_if_longer(is_smaller, LENGTH_PRECISION)
    if lengths is None and all(results):  # no call has larger sizes only: slices that add up to a fixed length, for example
        lengths = Lengths({})
    return None if lengths is None else replace(variant, lengths=lengths)


def _is_less(min_peak: int, candidate: Cost, baseline: Cost) -> bool:
    """Return whether a candidate takes less memory than the baseline: loops, or another unchunked variant.

    Either the smallest peak of all variants, `min_peak`, is at least 2 % lower; the candidate's is about `min_peak`. Or its peak
    is not higher, and it holds at least 2 % less between forward and backward, which counts when other graphs run in between.
    """
    return min_peak * TOLERANCE < baseline.peak or (
        candidate.peak <= baseline.peak and candidate.held * TOLERANCE < baseline.held
    )


def _with_cost(build: Callable[[], GraphPair], num_outputs: int) -> UnchunkedGraph | None:
    """Build an unchunked variant, simulate a step, and return the variant with its cost; None (logged) if that fails."""
    try:
        graphs = build()
        return UnchunkedGraph(graphs, cost_of(*graphs, num_outputs))
    except Exception as error:  # an operator that only a tracer can run
        log.info("the memory of the unchunked graph is not known: %s", describe_error(error))
        return None


def min_live_bytes(joint: JointGraph) -> int:
    """Return a lower bound on the peak bytes without chunks, for any fusion and recomputation.

    A product (matmul) reads its operands from memory and writes its result to memory. No partitioner recomputes a product
    unless the user's code requests it, so results that a backward operator reads are kept until their last use. Gradients
    live until the end.
    """
    nodes = joint.nodes
    products = (node for node in nodes if is_expensive(node))
    operands_and_result = (bytes_of_values({node, *computed_memories(node.all_input_nodes)}) for node in products)
    return max(*operands_and_result, *_alive_in_backward(joint, nodes), 0)


def _alive_in_backward(joint: JointGraph, nodes: list[fx.Node]) -> Iterator[int]:
    """Yield the bytes alive before the first backward operator, and at each: kept forward products, and gradients so far."""
    dependent = descendants(joint.tangents, nodes)
    backward = [node for node in nodes if node in dependent]  # others, as the mask of `clamp`, may run in the forward graph
    last_user = {
        source: node for node in backward for source in computed_memories(node.all_input_nodes) if source in joint.forward
    }
    last_user = {source: node for source, node in last_user.items() if is_expensive(source) and RECOMPUTE not in source.meta}
    freed_after = Counter[fx.Node]()
    alive = bytes_of_values(last_user)
    for source, node in last_user.items():
        freed_after[node] += bytes_of_values((source,))
    gradients = computed_memories(node for node in joint.gradients if isinstance(node, fx.Node)) - joint.forward
    yield alive
    for node in backward:
        alive += bytes_of_values(gradients & {node})
        yield alive
        alive -= freed_after[node]
