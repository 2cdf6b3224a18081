"""Find the derived axes of the sequence: axes sliced from it, padded around it, or formed by blocks of its rows."""

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
MOST_SLICES = 24


def sequence_of(main: Atom, axes: AxisFacts) -> SequenceAxis:
    """Return the sequence with this main axis, its derived axes and block sizes."""
    cuts = _tilings(axes, axes.table.size(main))
    members, blocks = members_of(main, axes, cuts)
    sound = [cut for cut in cuts if not any(atom in members for atom in cut.inside)]
    if len(sound) < len(cuts):  # if a slice selects one block, rows of the block are rows of the sequence, too
        members, blocks = members_of(main, axes, sound)
    return SequenceAxis(main, axes.table.size(main), members, blocks, _block_sizes(members, axes))


def _block_sizes(members: Container[Atom], axes: AxisFacts) -> frozenset[int]:
    """Return the block sizes of recurrences along these axes: a chunk must hold whole blocks."""
    runs = [(run, axes.letters[node][run.axes.rows]) for node in axes.signatures if isinstance(run := node.target, Recurrence)]
    return frozenset(run.block for run, dim in runs if any(atom in members for atom in axes.table.resolve(dim)))


def members_of(
    main: Atom, axes: AxisFacts, cuts: Sequence[TiledAxis] = ()
) -> tuple[dict[Atom, tuple[Size, Size]], dict[Atom, int]]:
    """Return the derived axes with their offsets and lengths, and the block sizes of those that consist of blocks.

    A slice [a:] may be added to a slice [:-a]: then their rows are shifted against each other, and the new axis gets
    one of the two offsets. We choose the one for which the other slice reads earlier rows, which a loop from left to
    right can serve.
    """
    members: dict[Atom, tuple[Size, Size]] = {main: (0, axes.table.size(main))}
    blocks: dict[Atom, int] = {}
    links, joins = _drop_axes_sliced_often(shift_links(axes), axes), _concat_axes(axes)
    changed = True
    while changed:
        changed = False
        for tiling in cuts:
            whole, block_axis = tiling.whole, tiling.blocks
            if whole in members and whole not in blocks and block_axis not in members and members[whole][0] % tiling.size == 0:
                members[block_axis], blocks[block_axis] = (members[whole][0], axes.table.size(block_axis)), tiling.size
                changed = True
        for concat in joins:
            if concat.whole not in members and (begin := concat.begin(members, blocks)) is not None:
                members[concat.whole] = begin, axes.table.size(concat.whole)
                changed = True
        candidates: dict[Atom, list[tuple[bool, Size]]] = defaultdict(list)
        sizes: dict[Atom, int] = {}
        for source, target, start, is_static in links:
            if source in members and target not in members:
                candidates[target].append((not is_static, members[source][0] + start * blocks.get(source, 1)))
                sizes[target] = blocks.get(source, 1)
        for atom, offsets_found in candidates.items():
            preferred = [offset for computed, offset in offsets_found if computed] or [offset for _, offset in offsets_found]
            members[atom] = (max(preferred, key=numeric), axes.table.size(atom))
            blocks |= {atom: sizes[atom]} if sizes[atom] != 1 else {}
            changed = True
    return members, blocks


def _drop_axes_sliced_often(links: list[Link], axes: AxisFacts) -> list[Link]:
    """Drop links to axes that are sliced in very many ways: `x[:1]`, `x[:2]`, ... belong to an unrolled loop.

    Static values, such as a mask written row by row, may be sliced freely: they are computed once, in full.
    """
    slices: dict[Atom, set[tuple[Size, Size]]] = defaultdict(set)
    for source, target, start, is_static in links:
        if not is_static:
            slices[source].add((start, axes.table.size(target)))
            slices[target].add((start, axes.table.size(source)))
    return [link for link in links if max(len(slices[link[0]]), len(slices[link[1]])) <= MOST_SLICES]


@dataclass(frozen=True)
class TiledAxis:
    """An axis that views split into `blocks` of `size` rows each; the dimension within a block has the axes `inside`."""

    whole: Atom
    blocks: Atom
    inside: Dim
    size: int


def _tilings(axes: AxisFacts, length: Size) -> list[TiledAxis]:
    """Return the tilings of axes. Chunks hold whole blocks of all sizes, so blocks larger than half the sequence do
    not count.
    """
    tilings = [
        TiledAxis(whole, outer[0], inner, size)
        for whole, outer, inner in axes.table.cuts()
        if len(outer) == 1 and isinstance(size := axes.table.size_of_dim(inner), int)
    ]
    sizes: list[int] = []
    for size in sorted({cut.size for cut in tilings}):
        if not isinstance(length, int) or 2 * lcm(*sizes, size) <= length:
            sizes.append(size)
    return [cut for cut in tilings if cut.size in sizes]


@dataclass(frozen=True)
class ConcatAxis:
    """A concatenated axis, with each operand's axis and the number of rows before it."""

    whole: Atom
    parts: tuple[tuple[Atom, Size], ...]

    def begin(self, members: Mapping[Atom, tuple[Size, Size]], blocks: Container[Atom]) -> Size | None:
        """Return the position of the first row if all rows are rows of the sequence, in order and without gaps."""
        if any(part not in members or part in blocks for part, _ in self.parts):
            return None
        begins = {simplified(members[part][0] - before) for part, before in self.parts}
        return begins.pop() if len(begins) == 1 else None


def _concat_axes(axes: AxisFacts) -> list[ConcatAxis]:
    """Return the concatenated axes of all concatenations whose operands have exactly one axis."""
    return [join for node in axes.signatures if (join := join_of(node, axes)) is not None]


def join_of(node: fx.Node, axes: AxisFacts) -> ConcatAxis | None:
    """Return the concatenated axis of a node if each operand has exactly one axis."""
    concat = axes.signatures[node].joined
    if concat is None:
        return None
    letter, joined = concat
    dims = [axes.table.resolve(axes.letters[node][item]) for item in (letter, *(part for part, _ in joined.parts))]
    if any(len(dim) != 1 for dim in dims):
        return None
    (whole,), *parts = dims
    return ConcatAxis(whole, tuple((part, before) for (part,), (_, before) in zip(parts, joined.parts, strict=True)))


def stands_in_place(node: fx.Node, axes: AxisFacts) -> bool:
    """Return whether a concatenation keeps rows of the sequence at their positions, so that it can run chunk by chunk."""
    sequence, join = axes.sequence, join_of(node, axes)
    if sequence is None or join is None or join.whole not in sequence.members or join.whole in sequence.blocks:
        return False
    return join.begin(sequence.members, sequence.blocks) == sequence.members[join.whole][0]


def turned_axes(axes: AxisFacts) -> set[Atom]:
    """Return axes whose slices are concatenated at other positions than those they were sliced from."""
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
    """Return (source axis, sliced or padded axis, position of its first row in the source, is static) per window."""
    links = []
    for node, signature in axes.signatures.items():
        for letter, window in signature.windows.items():
            source = axes.table.resolve(axes.letters[node][window.of])
            target = axes.table.resolve(axes.letters[node][letter])
            if len(source) == len(target) == 1:
                links.append((source[0], target[0], window.start + window.reach, node in axes.static))
    return links
