"""Find the point at which a graph changes from one sequence to another: encoder to decoder, or segment to segment.

    encoder:  x[b s d] -> ... -> memory[b s d]          decoder:  y[b t d], memory[b s d] -> ... -> logits[b t v]

Only one axis of a graph is chunked. If large values have another axis instead, and come before or after those with the
chunked axis, then two graphs with one axis each take less memory. Any split is exact: the second graph reads values of the
first, and autograd passes gradients back. So only bytes decide where the graph is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.axis_table import Atom
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
    atoms: frozenset[Atom]
    size: int


def find_split(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
    """Return the node of Dynamo's `graph` at which the second graph begins; None if the graph has one sequence.

    `peak()` returns the peak bytes of a step with one graph. It is called only if there may be a second sequence.
    """
    if facts.found_axes is None or facts.axes.sequence is None:
        return None
    nodes = list(graph.nodes)
    computed = list(_forward_results(facts, {node.name: i for i, node in enumerate(nodes)}))
    main = frozenset(i for i, item in enumerate(computed) if not item.atoms.isdisjoint(facts.axes.sequence.members))
    others = _other_axes(computed, main)
    if not others:
        return None
    passed_bytes_at, min_bytes = bytes_at_split_points(nodes), MIN_SHARE * peak()
    splits: list[tuple[int, int]] = []
    for other in (other for other in others if sum(computed[i].size for i in other - main) >= min_bytes):
        splits += _split_costs(
            passed_bytes_at, [_bytes_by_index(computed, other - main), _bytes_by_index(computed, main - other)], len(nodes)
        )
    return nodes[min(splits)[1]] if splits else None


def _bytes_by_index(computed: Sequence[ForwardOperator], chosen: Iterable[int]) -> Counter[int]:
    """Return the bytes of the chosen results, summed by index in Dynamo's graph."""
    sizes = Counter[int]()
    for i in chosen:
        sizes[computed[i].node_index] += computed[i].size
    return sizes


def _forward_results(facts: Facts, order: dict[str, int]) -> Iterable[ForwardOperator]:
    """Yield the forward results. A result without a node in Dynamo's graph gets the index of the one before it."""
    axes, node_index = facts.axes, 0
    for node in facts.joint.nodes:
        if node not in facts.joint.forward:
            continue
        node_index = next((order[name] for name in names_in_dynamo(node) if name in order), node_index)
        if node not in axes.static and not only_moves_elements(node):
            for shape, value in zip(axes.results.get(node, ()), results_of(node), strict=False):
                yield ForwardOperator(
                    node_index, frozenset(atom for dim in shape for atom in axes.table.resolve(dim)), bytes_like(value)
                )


def _other_axes(computed: Sequence[ForwardOperator], main: frozenset[int]) -> list[frozenset[int]]:
    """Return, for each possible second sequence, the values with this axis; `main` are those with the chunked axis.

    Many values must have this axis only, and many the chunked axis only, which excludes the batch. An axis is omitted if
    another axis has all of its values, as rows have those of heads.
    """
    results_of_axis: dict[Atom, set[int]] = {}
    for i, item in enumerate(computed):
        for atom in item.atoms:
            results_of_axis.setdefault(atom, set()).add(i)
    axes = [
        results
        for results in dict.fromkeys(map(frozenset, results_of_axis.values()))
        if min(len(main - results), len(results - main)) >= MIN_VALUES_SHARE * len(main)
    ]
    return [results for results in axes if not any(results - main < larger - main for larger in axes)]


def bytes_at_split_points(nodes: list[fx.Node]) -> dict[int, int]:
    """Return the bytes that the first graph passes to the second, for each index at which the graph may be split."""
    index = {node: i for i, node in enumerate(nodes)}
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
    count = range(len(nodes))
    passed_bytes = list(accumulate(bytes_begin[i] - bytes_end[i] for i in count))
    unpassable = list(accumulate(unpassable_begin[i] - unpassable_end[i] for i in count))
    candidates = (index[node] for node in split_points(nodes[0].graph))
    return {node_index: passed_bytes[node_index] for node_index in candidates if not unpassable[node_index]}


def _split_costs(passed_bytes_at: dict[int, int], bytes_of: Sequence[Counter[int]], count: int) -> Iterable[tuple[int, int]]:
    """Yield (cost, index) of each split that roughly separates both axes: bytes in the wrong graph, and bytes passed."""
    totals = [sum(sizes.values()) for sizes in bytes_of]
    before = [[0, *accumulate(sizes[i] for i in range(count))] for sizes in bytes_of]
    for node_index, passed_bytes in passed_bytes_at.items():
        for first in (0, 1):
            misplaced = {first: totals[first] - before[first][node_index], 1 - first: before[1 - first][node_index]}
            if all(misplaced[i] <= MAX_MISPLACED_SHARE * totals[i] for i in misplaced):
                yield sum(misplaced.values()) + passed_bytes, node_index
