"""Where does a graph go from one sequence to another one: from an encoder's rows to a decoder's, from one segment to the next?

    encoder:  x[b s d] -> ... -> memory[b s d]          decoder:  y[b t d], memory[b s d] -> ... -> logits[b t v]

Only one axis of a graph is streamed. If much is computed along another axis, before or after all that is computed along the
first, two graphs with an axis each take less memory. Any place is exact: the second part is given what it reads of the first, and
autograd hands gradients back. So the place is chosen by bytes alone.
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

SHARE = 0.1  # of the peak: so much is computed along another axis at least, without the one that is streamed
MISPLACED = 0.5  # of the bytes along one axis alone: at most so many are in the other part
FEW = 0.1  # of the values along the axis that is streamed: at least so many are without the other, and of the other without it


class ForwardOperator(NamedTuple):
    """What an operator of the forward half computes: its place in Dynamo's graph, the axes, the bytes."""

    place: int
    atoms: frozenset[Atom]
    size: int


def where_to_split(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
    """The operator of Dynamo's `graph` that the second part begins with; None for a graph of one sequence.

    A step through the graph in one part takes `peak()` bytes, which most graphs, of one sequence, are not asked for.
    """
    if facts.found_axes is None or facts.axes.sequence is None:
        return None
    nodes = list(graph.nodes)
    made = list(_made(facts, {node.name: i for i, node in enumerate(nodes)}))
    main = frozenset(i for i, item in enumerate(made) if not item.atoms.isdisjoint(facts.axes.sequence.members))
    others = _others(made, main)
    if not others:
        return None
    places, least = places_of(nodes), SHARE * peak()
    found: list[tuple[int, int]] = []
    for other in (other for other in others if sum(made[i].size for i in other - main) >= least):
        found += _priced(places, [_by_place(made, other - main), _by_place(made, main - other)], len(nodes))
    return nodes[min(found)[1]] if found else None


def _by_place(made: Sequence[ForwardOperator], chosen: Iterable[int]) -> Counter[int]:
    found = Counter[int]()
    for i in chosen:
        found[made[i].place] += made[i].size
    return found


def _made(facts: Facts, order: dict[str, int]) -> Iterable[ForwardOperator]:
    """An operator that no node of Dynamo's is known for, as one that a pass has written, stands where those in front of it do."""
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


def _others(made: Sequence[ForwardOperator], main: frozenset[int]) -> list[frozenset[int]]:
    """By its values each axis that many are computed along without the one that is streamed, which also has values without it.

    The batch is none, as all rows have it. Nor is an axis of which all values have a wider one as well, as heads have rows.
    """
    along: dict[Atom, set[int]] = {}
    for i, item in enumerate(made):
        for atom in item.atoms:
            along.setdefault(atom, set()).add(i)
    found = [
        own for own in dict.fromkeys(map(frozenset, along.values())) if min(len(main - own), len(own - main)) >= FEW * len(main)
    ]
    return [own for own in found if not any(own - main < other - main for other in found)]


def places_of(nodes: list[fx.Node]) -> dict[int, int]:
    """The places at which all that is handed on can be, with the bytes of it."""
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
    """For each place at which one axis all but ends and the other begins: bytes in the wrong part or handed on, and the place."""
    totals = [sum(found.values()) for found in bytes_of]
    before = [[0, *accumulate(found[i] for i in range(count))] for found in bytes_of]
    for place, handed in places.items():
        for first in (0, 1):
            wrong = {first: totals[first] - before[first][place], 1 - first: before[1 - first][place]}
            if all(wrong[i] <= MISPLACED * totals[i] for i in wrong):
                yield sum(wrong.values()) + handed, place
