"""Find the point where a graph passes from one sequence to another: encoder to decoder, or one segment to the next.

    encoder:  x[b s d] -> ... -> memory[b s d]          decoder:  y[b t d], memory[b s d] -> ... -> logits[b t v]

Only one axis of a graph is chunked. If much is computed along another axis, before or after the operators along the
first, two graphs with one axis each take less memory. Any split is exact: the second graph reads values of the
first, and autograd passes gradients back. So the split is chosen by bytes alone.
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
from streamfx.passes.ops.traits import is_moved_elements
from streamfx.torch_private.split import is_handed_on, names_in_dynamo, places_to_split

SHARE = 0.1  # share of the peak: a split needs at least this many bytes along another axis that lack the chunked axis
MISPLACED = 0.5  # share of the bytes along one axis alone: at most this much may be in the other graph
FEW = 0.1  # share of the values along the chunked axis: each axis needs at least this many values without the other axis


class ForwardOperator(NamedTuple):
    """A result of a forward operator: its index in Dynamo's graph, its axes, its bytes."""

    place: int
    atoms: frozenset[Atom]
    size: int


def where_to_split(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
    """Return the operator of Dynamo's `graph` at which the second graph begins; None for a graph of one sequence.

    `peak()` returns the bytes of a step in one graph. It is not called for most graphs, which have one sequence.
    """
    if facts.found_axes is None or facts.axes.sequence is None:
        return None
    nodes = list(graph.nodes)
    computed = list(_made(facts, {node.name: i for i, node in enumerate(nodes)}))
    main = frozenset(i for i, item in enumerate(computed) if not item.atoms.isdisjoint(facts.axes.sequence.members))
    others = _others(computed, main)
    if not others:
        return None
    places, least = places_of(nodes), SHARE * peak()
    splits: list[tuple[int, int]] = []
    for other in (other for other in others if sum(computed[i].size for i in other - main) >= least):
        splits += _priced(places, [_by_place(computed, other - main), _by_place(computed, main - other)], len(nodes))
    return nodes[min(splits)[1]] if splits else None


def _by_place(computed: Sequence[ForwardOperator], chosen: Iterable[int]) -> Counter[int]:
    """Return the bytes of the chosen results, summed by index in Dynamo's graph."""
    sizes = Counter[int]()
    for i in chosen:
        sizes[computed[i].place] += computed[i].size
    return sizes


def _made(facts: Facts, order: dict[str, int]) -> Iterable[ForwardOperator]:
    """Yield the forward results; operators without a node in Dynamo's graph take their predecessor's index."""
    axes, place = facts.axes, 0
    for node in facts.joint.nodes:
        if node not in facts.joint.forward:
            continue
        place = next((order[name] for name in names_in_dynamo(node) if name in order), place)
        if node not in axes.static and not is_moved_elements(node):
            for shape, value in zip(axes.results.get(node, ()), results_of(node), strict=False):
                yield ForwardOperator(
                    place, frozenset(atom for dim in shape for atom in axes.table.resolve(dim)), bytes_like(value)
                )


def _others(computed: Sequence[ForwardOperator], main: frozenset[int]) -> list[frozenset[int]]:
    """Return the values of each axis that has many values without the chunked axis, and vice versa.

    The batch axis does not qualify, since all rows have it. Nor does an axis whose values are a subset of another
    axis's, as heads are of rows.
    """
    along: dict[Atom, set[int]] = {}
    for i, item in enumerate(computed):
        for atom in item.atoms:
            along.setdefault(atom, set()).add(i)
    axes = [
        own for own in dict.fromkeys(map(frozenset, along.values())) if min(len(main - own), len(own - main)) >= FEW * len(main)
    ]
    return [own for own in axes if not any(own - main < other - main for other in axes)]


def places_of(nodes: list[fx.Node]) -> dict[int, int]:
    """Return the valid split points, with the bytes passed from the first graph to the second."""
    number = {node: i for i, node in enumerate(nodes)}
    begins, ends = Counter[int](), Counter[int]()
    opens, closes = Counter[int](), Counter[int]()
    for node in nodes:
        readers = [number[user] for user in node.users if user.op != "output"]
        if node.op in ("placeholder", "get_attr") or not readers:
            continue
        size = bytes_like(node.meta.get(EXAMPLE_VALUE))
        begins[number[node] + 1] += size
        ends[max(readers) + 1] += size
        if not is_handed_on(node):
            opens[number[node] + 1] += 1
            closes[max(readers) + 1] += 1
    count = range(len(nodes))
    handed = list(accumulate(begins[i] - ends[i] for i in count))
    barred = list(accumulate(opens[i] - closes[i] for i in count))
    candidates = (number[node] for node in places_to_split(nodes[0].graph))
    return {place: handed[place] for place in candidates if not barred[place]}


def _priced(places: dict[int, int], bytes_of: Sequence[Counter[int]], count: int) -> Iterable[tuple[int, int]]:
    """For each split that roughly separates both axes, yield the bytes on the wrong side or passed on, and its index."""
    totals = [sum(found.values()) for found in bytes_of]
    before = [[0, *accumulate(found[i] for i in range(count))] for found in bytes_of]
    for place, handed in places.items():
        for first in (0, 1):
            wrong = {first: totals[first] - before[first][place], 1 - first: before[1 - first][place]}
            if all(wrong[i] <= MISPLACED * totals[i] for i in wrong):
                yield sum(wrong.values()) + handed, place
