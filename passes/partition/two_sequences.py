"""Find the point at which a graph changes from one sequence to another: encoder to decoder, or segment to segment.

    encoder:  x[b s d] -> ... -> memory[b s d]          decoder:  y[b t d], memory[b s d] -> ... -> logits[b t v]

Only one axis of a graph is chunked. If large values have another axis instead, and come before or after those with the
chunked axis, then two graphs with one axis each take less memory. Any split is exact: the second graph reads values of the
first, and autograd passes gradients back. So only bytes decide where the graph is split. *Dynamo's graph* is split; axes are
known for the operators of the joint graph, whose metadata names the nodes of Dynamo's graph that they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.axis_table import AxisFactor
from streamfx.ir.facts import Facts
from streamfx.ir.joint import results_of
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.passes.ops.traits import only_moves_elements
from streamfx.torch_private.split import can_be_input, names_in_dynamo, split_points

MIN_SHARE = 0.1  # of the peak: a split needs values of so many bytes that have another axis instead of the chunked one
MAX_MISPLACED_SHARE = 0.5  # of the bytes of the values with one axis only: so many may be in the wrong graph
MIN_VALUES_SHARE = (
    0.1  # of the values with the chunked axis: so many must have the other axis only, and so many the chunked axis only
)


class ForwardOperator(NamedTuple):
    """A result of a forward operator: its node's index in Dynamo's graph, its axes, its bytes."""

    node_index: int
    factors: frozenset[AxisFactor]
    size: int


def find_split(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
    """Return the node of Dynamo's `graph` at which the second graph begins; None if the graph has one sequence.

    `peak()` returns the peak bytes of a step with one graph. It is called only if there may be a second sequence.
    """
    if facts.found_axes is None or facts.axes.sequence is None:
        return None
    nodes = list(graph.nodes)
    results = list(_forward_results(facts, {node.name: i for i, node in enumerate(nodes)}))
    with_main_axis = frozenset(i for i, item in enumerate(results) if not item.factors.isdisjoint(facts.axes.sequence.members))
    other_axes = _other_axes(results, with_main_axis)
    if not other_axes:
        return None
    passed_bytes_at, min_bytes = bytes_at_split_points(nodes), MIN_SHARE * peak()
    splits: list[tuple[int, int]] = []  # (cost, index in Dynamo's graph)
    for with_other_axis in other_axes:
        only_other, only_main = with_other_axis - with_main_axis, with_main_axis - with_other_axis
        if sum(results[i].size for i in only_other) >= min_bytes:
            bytes_of_axes = [_bytes_by_index(results, only_other), _bytes_by_index(results, only_main)]
            splits += _split_costs(passed_bytes_at, bytes_of_axes, len(nodes))
    _, split_index = min(splits, default=(0, None))
    return None if split_index is None else nodes[split_index]


def _bytes_by_index(results: Sequence[ForwardOperator], chosen: Iterable[int]) -> Counter[int]:
    """Return the bytes that each node of Dynamo's graph computes, by node index; only of the results at indices `chosen`."""
    sizes = Counter[int]()
    for i in chosen:
        sizes[results[i].node_index] += results[i].size
    return sizes


def _forward_results(facts: Facts, order: dict[str, int]) -> Iterable[ForwardOperator]:
    """Yield the results of forward operators, except views (and other moves of elements) and values of positions only.

    `order` maps the names of nodes in Dynamo's graph to their index. A result without such a node gets the index of the result
    before it.
    """
    axes, node_index = facts.axes, 0
    for node in facts.joint.nodes:
        if node not in facts.joint.forward:
            continue
        node_index = next((order[name] for name in names_in_dynamo(node) if name in order), node_index)
        if node not in axes.static and not only_moves_elements(node):
            for shape, value in zip(axes.results.get(node, ()), results_of(node), strict=False):
                yield ForwardOperator(
                    node_index, frozenset(factor for dim in shape for factor in axes.table.resolve(dim)), bytes_like(value)
                )


def _other_axes(results: Sequence[ForwardOperator], main: frozenset[int]) -> list[frozenset[int]]:
    """Return, for each axis that may be a second sequence, the indices of the results that have it.

    `main`: the indices of the results with the chunked axis. Many results must have the other axis only, and many the chunked
    axis only, which excludes the batch. An axis is omitted if another axis has all of its results, as rows have those of heads.
    """
    indices_of_axis: dict[AxisFactor, set[int]] = {}
    for i, item in enumerate(results):
        for factor in item.factors:
            indices_of_axis.setdefault(factor, set()).add(i)
    axes = [
        indices
        for indices in dict.fromkeys(map(frozenset, indices_of_axis.values()))
        if min(len(main - indices), len(indices - main)) >= MIN_VALUES_SHARE * len(main)
    ]
    return [indices for indices in axes if not any(indices - main < larger - main for larger in axes)]


def bytes_at_split_points(nodes: list[fx.Node]) -> dict[int, int]:
    """Return the bytes that the first graph passes to the second, for each index at which the graph may be split.

    Index i splits before `nodes[i]`. Indices are omitted if a value that cannot be a graph input would have to be passed.
    """
    index = {node: i for i, node in enumerate(nodes)}
    # by index: values that are passed from this split point on, until that one
    bytes_begin, bytes_end = Counter[int](), Counter[int]()
    unpassable_begin, unpassable_end = Counter[int](), Counter[int]()
    for node in nodes:
        readers = [index[user] for user in node.users if user.op != "output"]
        if node.op in ("placeholder", "get_attr") or not readers:
            continue
        size = bytes_like(node.meta.get(EXAMPLE_VALUE))
        bytes_begin[index[node] + 1] += size
        bytes_end[max(readers) + 1] += size
        if not can_be_input(node):
            unpassable_begin[index[node] + 1] += 1
            unpassable_end[max(readers) + 1] += 1
    indices = range(len(nodes))
    passed_bytes = list(accumulate(bytes_begin[i] - bytes_end[i] for i in indices))
    num_unpassable = list(accumulate(unpassable_begin[i] - unpassable_end[i] for i in indices))
    candidates = (index[node] for node in split_points(nodes[0].graph))
    return {node_index: passed_bytes[node_index] for node_index in candidates if not num_unpassable[node_index]}


def _split_costs(
    passed_bytes_at: dict[int, int], bytes_of_axes: Sequence[Counter[int]], num_nodes: int
) -> Iterable[tuple[int, int]]:
    """Yield (cost, index) for each split of Dynamo's graph that roughly separates two axes.

    The cost is the bytes computed in the wrong graph, plus the bytes passed from one graph to the other. `bytes_of_axes`: for
    each of two axes, the bytes of the values that have only this axis, by node index. Either axis may be in the first graph.
    """
    totals = [sum(sizes.values()) for sizes in bytes_of_axes]
    bytes_before = [[0, *accumulate(sizes[i] for i in range(num_nodes))] for sizes in bytes_of_axes]
    for node_index, passed_bytes in passed_bytes_at.items():
        for first_axis in (0, 1):
            second_axis = 1 - first_axis
            misplaced = {
                first_axis: totals[first_axis] - bytes_before[first_axis][node_index],
                second_axis: bytes_before[second_axis][node_index],
            }
            if all(misplaced[axis] <= MAX_MISPLACED_SHARE * totals[axis] for axis in misplaced):
                yield sum(misplaced.values()) + passed_bytes, node_index
