"""Which axes are cut out of the sequence, padded around it, or made of blocks of it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeAlias

from torch import fx

from streamfx.ir.axis_table import Atom, Dim
from streamfx.ir.facts import AxisFacts, SequenceAxis
from streamfx.ir.sizes import Size, numeric, simplified
from streamfx.runtime.chunked_recurrences import Recurrence

Link: TypeAlias = "tuple[Atom, Atom, Size, bool]"
MOST_PARTS = 24


def sequence_of(main: Atom, axes: AxisFacts) -> SequenceAxis:
    cuts = _cuts(axes, axes.table.size(main))
    members, blocks = members_of(main, axes, cuts)
    sound = [cut for cut in cuts if not any(atom in members for atom in cut.inside)]
    if len(sound) < len(cuts):  # the rows of a block are rows of the sequence as well, where slices take out one block
        members, blocks = members_of(main, axes, sound)
    return SequenceAxis(main, axes.table.size(main), members, blocks, _together(members, axes))


def _together(members: Container[Atom], axes: AxisFacts) -> frozenset[int]:
    """How many rows of these axes operators take at once: chunks may not begin between them."""
    runs = [(run, axes.letters[node][run.axes.rows]) for node in axes.signatures if isinstance(run := node.target, Recurrence)]
    return frozenset(run.block for run, dim in runs if any(atom in members for atom in axes.table.resolve(dim)))


def members_of(
    main: Atom, axes: AxisFacts, cuts: Sequence[TiledAxis] = ()
) -> tuple[dict[Atom, tuple[Size, Size]], dict[Atom, int]]:
    """Axes cut out of the sequence, padded around it or made of blocks of it, with their offsets; and the blocks' sizes.

    A slice [a:] may be joined with a slice [:-a]: then rows are shifted against each other, and one of the two offsets
    is chosen for the new axis: the one that makes the other a look back, which a loop from left to right can serve.
    """
    members: dict[Atom, tuple[Size, Size]] = {main: (0, axes.table.size(main))}
    blocks: dict[Atom, int] = {}
    links, joins = _few_for_each(shift_links(axes), axes), _joins(axes)
    grown = True
    while grown:
        grown = False
        for cut in cuts:
            own, outer = cut.whole, cut.blocks
            if own in members and own not in blocks and outer not in members and members[own][0] % cut.size == 0:
                members[outer], blocks[outer] = (members[own][0], axes.table.size(outer)), cut.size
                grown = True
        for join in joins:
            if join.whole not in members and (begin := join.begin(members, blocks)) is not None:
                members[join.whole] = begin, axes.table.size(join.whole)
                grown = True
        candidates: dict[Atom, list[tuple[bool, Size]]] = defaultdict(list)
        sizes: dict[Atom, int] = {}
        for source, target, start, is_static in links:
            if source in members and target not in members:
                candidates[target].append((not is_static, members[source][0] + start * blocks.get(source, 1)))
                sizes[target] = blocks.get(source, 1)
        for atom, offers in candidates.items():
            preferred = [offset for computed, offset in offers if computed] or [offset for _, offset in offers]
            members[atom] = (max(preferred, key=numeric), axes.table.size(atom))
            blocks |= {atom: sizes[atom]} if sizes[atom] != 1 else {}
            grown = True
    return members, blocks


def _few_for_each(links: list[Link], axes: AxisFacts) -> list[Link]:
    """Without the parts of an axis that is cut in very many places: `x[:1]`, `x[:2]`, ... belong to a loop that was unrolled.

    Static values, such as a mask written row by row, may be cut as they like: they are made whole.
    """
    places: dict[Atom, set[tuple[Size, Size]]] = defaultdict(set)
    for source, target, start, is_static in links:
        if not is_static:
            places[source].add((start, axes.table.size(target)))
            places[target].add((start, axes.table.size(source)))
    return [link for link in links if max(len(places[link[0]]), len(places[link[1]])) <= MOST_PARTS]


@dataclass(frozen=True)
class TiledAxis:
    """An axis that views cut into `blocks` of `size` rows each, which have the axes `inside`."""

    whole: Atom
    blocks: Atom
    inside: Dim
    size: int


def _cuts(axes: AxisFacts, length: Size) -> list[TiledAxis]:
    """Chunks have to hold whole blocks of all sizes, so that a block as long as half the sequence is none."""
    found = [
        TiledAxis(own, outer[0], inner, size)
        for own, outer, inner in axes.table.cuts()
        if len(outer) == 1 and isinstance(size := axes.table.size_of_dim(inner), int)
    ]
    sizes: list[int] = []
    for size in sorted({cut.size for cut in found}):
        if not isinstance(length, int) or 2 * lcm(*sizes, size) <= length:
            sizes.append(size)
    return [cut for cut in found if cut.size in sizes]


@dataclass(frozen=True)
class ConcatAxis:
    """An axis whose rows are those of others, one behind another: of each of these, how many rows come before."""

    whole: Atom
    parts: tuple[tuple[Atom, Size], ...]

    def begin(self, members: Mapping[Atom, tuple[Size, Size]], blocks: Container[Atom]) -> Size | None:
        """Where the first row stands, if all rows are rows of the sequence, each behind the one in front of it."""
        if any(part not in members or part in blocks for part, _ in self.parts):
            return None
        begins = {simplified(members[part][0] - before) for part, before in self.parts}
        return begins.pop() if len(begins) == 1 else None


def _joins(axes: AxisFacts) -> list[ConcatAxis]:
    return [join for node in axes.signatures if (join := join_of(node, axes)) is not None]


def join_of(node: fx.Node, axes: AxisFacts) -> ConcatAxis | None:
    """What an operator joins, if each part has an axis of its own."""
    found = axes.signatures[node].joined
    if found is None:
        return None
    letter, joined = found
    dims = [axes.table.resolve(axes.letters[node][item]) for item in (letter, *(part for part, _ in joined.parts))]
    if any(len(dim) != 1 for dim in dims):
        return None
    (whole,), *parts = dims
    return ConcatAxis(whole, tuple((part, before) for (part,), (_, before) in zip(parts, joined.parts, strict=True)))


def stands_in_place(node: fx.Node, axes: AxisFacts) -> bool:
    """Whether rows of the sequence are joined, each behind the one in front of it: a chunk joins its own of each part."""
    sequence, join = axes.sequence, join_of(node, axes)
    if sequence is None or join is None or join.whole not in sequence.members or join.whole in sequence.blocks:
        return False
    return join.begin(sequence.members, sequence.blocks) == sequence.members[join.whole][0]


def turned_axes(axes: AxisFacts) -> set[Atom]:
    """Axes whose parts are joined again in other places than those from which they were cut."""
    starts: dict[tuple[Atom, Atom], set[Size]] = defaultdict(set)
    for source, target, start, _ in shift_links(axes):
        starts[source, target].add(start)
    joins = [join for node in axes.signatures if (join := join_of(node, axes)) is not None]
    return {
        join.whole
        for join in joins
        if len({simplified(start - before) for part, before in join.parts for start in starts[join.whole, part]}) > 1
    }


def shift_links(axes: AxisFacts) -> list[Link]:
    links = []
    for node, signature in axes.signatures.items():
        for letter, window in signature.windows.items():
            source = axes.table.resolve(axes.letters[node][window.of])
            target = axes.table.resolve(axes.letters[node][letter])
            if len(source) == len(target) == 1:
                links.append((source[0], target[0], window.start + window.reach, node in axes.static))
    return links
