"""Find the derived axes of the sequence: axes sliced from it, padded around it, or formed by blocks of its rows.

An axis is identified by an axis factor (`AxisFactor`, an integer). Row i of a derived axis is row i + offset of the sequence; of
an axis of blocks, the `block_size` rows from i * block_size + offset on. `axes` holds what the axis analysis found:
`labels[node]` has the axis factors of each axis label of an operator's `Signature`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from torch import fx

from streamfx.ir.axis_table import AxisFactor, Dim
from streamfx.ir.facts import AxisFacts, DerivedRows, SequenceAxis
from streamfx.ir.sizes import Size, numeric, simplified
from streamfx.runtime.chunked_recurrences import Recurrence

MAX_SLICES = 24  # per axis: an axis with more slices belongs to an unrolled loop


class SliceLink(NamedTuple):
    """A slice or a padding: row 0 of the axis `target` is row `start` of the axis `source`."""

    source: AxisFactor
    target: AxisFactor
    start: Size
    is_static: bool


def sequence_of(main: AxisFactor, axes: AxisFacts) -> SequenceAxis:
    """Return the sequence whose axis is `main`, with all axes derived from it (slices, paddings, blocks), and block sizes."""
    tilings = _tilings(axes, axes.table.size(main))
    members, blocks = find_derived_axes(main, axes, tilings)
    disjoint_tilings = [tiling for tiling in tilings if not any(factor in members for factor in tiling.inner_axes)]
    if len(disjoint_tilings) < len(tilings):  # a slice selects one block: then rows within blocks, not blocks, are the sequence's
        members, blocks = find_derived_axes(main, axes, disjoint_tilings)
    return SequenceAxis(main, axes.table.size(main), members, blocks, _recurrence_block_sizes(members, axes))


def _recurrence_block_sizes(members: Container[AxisFactor], axes: AxisFacts) -> frozenset[int]:
    """Return how many rows recurrences along the axes `members` process at once: a chunk must hold a multiple of each."""
    runs = [(run, axes.labels[node][run.axes.rows]) for node in axes.signatures if isinstance(run := node.target, Recurrence)]
    return frozenset(run.block for run, dim in runs if any(factor in members for factor in axes.table.resolve(dim)))


def find_derived_axes(
    main: AxisFactor, axes: AxisFacts, tilings: Sequence[TiledAxis] = ()
) -> tuple[dict[AxisFactor, DerivedRows], dict[AxisFactor, int]]:
    """Return, by axis, the offset and length of each axis derived from `main` (and itself), and block sizes of block axes.

    Slices, paddings, blocks and concatenations of derived axes are derived axes, so the search runs until it finds no
    more. If a slice [a:] is added to a slice [:-a], the new axis has two possible offsets. The larger one is chosen: then
    the other slice reads earlier rows, which a loop from the first row to the last can serve.
    """
    members = {main: DerivedRows(0, axes.table.size(main))}
    blocks: dict[AxisFactor, int] = {}
    links = _drop_axes_sliced_often(find_slice_links(axes), axes)
    concats = _concat_axes(axes)
    changed = True
    while changed:
        changed = False
        for axis, block_axis, _, block_size in tilings:
            is_new = axis in members and axis not in blocks and block_axis not in members
            if is_new and members[axis].offset % block_size == 0:
                members[block_axis] = DerivedRows(members[axis].offset, axes.table.size(block_axis))
                blocks[block_axis] = block_size
                changed = True
        for concat in concats:
            if concat.axis not in members and (offset := concat.offset(members, blocks)) is not None:
                members[concat.axis] = DerivedRows(offset, axes.table.size(concat.axis))
                changed = True
        candidates: dict[AxisFactor, list[tuple[bool, Size]]] = defaultdict(list)  # (is the slice of a computed value, offset)
        block_sizes: dict[AxisFactor, int] = {}
        for source, target, start, is_static in links:
            if source in members and target not in members:
                candidates[target].append((not is_static, members[source].offset + start * blocks.get(source, 1)))
                block_sizes[target] = blocks.get(source, 1)
        for factor, offsets_found in candidates.items():
            preferred = [offset for computed, offset in offsets_found if computed] or [offset for _, offset in offsets_found]
            members[factor] = DerivedRows(max(preferred, key=numeric), axes.table.size(factor))
            blocks |= {factor: block_sizes[factor]} if block_sizes[factor] != 1 else {}
            changed = True
    return members, blocks


def _drop_axes_sliced_often(links: list[SliceLink], axes: AxisFacts) -> list[SliceLink]:
    """Drop links of axes that have more than `MAX_SLICES` slices: `x[:1]`, `x[:2]`, ... belong to an unrolled loop.

    Slices of static values are not counted, because static values are computed once, in full: a mask that is written row
    by row, for example.
    """
    slices: dict[AxisFactor, set[tuple[Size, Size]]] = defaultdict(set)
    for source, target, start, is_static in links:
        if not is_static:
            slices[source].add((start, axes.table.size(target)))
            slices[target].add((start, axes.table.size(source)))
    return [link for link in links if max(len(slices[link.source]), len(slices[link.target])) <= MAX_SLICES]


class TiledAxis(NamedTuple):
    """An axis that views split into blocks of `block_size` rows; a dimension of rows within a block has the `inner_axes`."""

    axis: AxisFactor
    block_axis: AxisFactor
    inner_axes: Dim
    block_size: int


def _tilings(axes: AxisFacts, length: Size) -> list[TiledAxis]:
    """Return the axes that views split into blocks, for chunks of a sequence of `length` rows.

    A chunk must hold full blocks of all of them. Block sizes are accepted from the smallest on, as long as their common
    multiple is at most half of the sequence.
    """
    tilings = [
        TiledAxis(axis, outer[0], inner, size)
        for axis, outer, inner in axes.table.block_splits()
        if len(outer) == 1 and isinstance(size := axes.table.size_of_dim(inner), int)
    ]
    sizes: list[int] = []
    for size in sorted({tiling.block_size for tiling in tilings}):
        if not isinstance(length, int) or 2 * lcm(*sizes, size) <= length:
            sizes.append(size)
    return [tiling for tiling in tilings if tiling.block_size in sizes]


@dataclass(frozen=True)
class ConcatAxis:
    """The axis of a concatenation, and its `parts`: each operand's axis, with the number of rows before it."""

    axis: AxisFactor
    parts: tuple[tuple[AxisFactor, Size], ...]

    def offset(self, members: Mapping[AxisFactor, DerivedRows], blocks: Container[AxisFactor]) -> Size | None:
        """Return which row of the sequence row 0 of the concatenation is; `self.parts`: (axis, rows before it) per operand.

        `members`: the offset in the sequence of each derived axis found so far; `blocks`: those of blocks. None unless all
        parts are derived axes, not of blocks, and their rows are adjacent rows of the sequence, in order.
        """
        if any(part not in members or part in blocks for part, _ in self.parts):
            return None
        offsets = {simplified(members[part].offset - rows_before) for part, rows_before in self.parts}
        return offsets.pop() if len(offsets) == 1 else None


def _concat_axes(axes: AxisFacts) -> list[ConcatAxis]:
    """Return the axes of all concatenations whose operands have exactly one axis."""
    return [concat for node in axes.signatures if (concat := find_concat_axis(node, axes)) is not None]


def find_concat_axis(node: fx.Node, axes: AxisFacts) -> ConcatAxis | None:
    """Return the concatenated axis of a node, with its operands' axes; None if the node is not a concatenation.

    Also None if the concatenated dimension of an operand or of the result is a product of several axes, or has size one.
    """
    concat = axes.signatures[node].concat
    if concat is None:
        return None
    label, concat_index = concat
    dims = [axes.table.resolve(axes.labels[node][item]) for item in (label, *(part for part, _ in concat_index.parts))]
    if any(len(dim) != 1 for dim in dims):
        return None
    (axis,), *part_dims = dims
    return ConcatAxis(
        axis, tuple((factor, rows_before) for (factor,), (_, rows_before) in zip(part_dims, concat_index.parts, strict=True))
    )


def keeps_row_positions(node: fx.Node, axes: AxisFacts) -> bool:
    """Return whether each row of a concatenation is the same row of the sequence as in its operand.

    Then the concatenation can run chunk by chunk.
    """
    sequence, concat = axes.sequence, find_concat_axis(node, axes)
    if sequence is None or concat is None or concat.axis not in sequence.members or concat.axis in sequence.blocks:
        return False
    return concat.offset(sequence.members, sequence.blocks) == sequence.members[concat.axis].offset


def reordered_axes(axes: AxisFacts) -> set[AxisFactor]:
    """Return the axes whose slices are concatenated in another order than they were sliced: cat([x[n:], x[:n]])."""
    starts: dict[tuple[AxisFactor, AxisFactor], set[Size]] = defaultdict(set)
    for source, target, start, _ in find_slice_links(axes):
        starts[source, target].add(start)
    return {
        concat.axis
        for concat in _concat_axes(axes)
        if len({simplified(start - before) for part, before in concat.parts for start in starts[concat.axis, part]}) > 1
    }


def find_slice_links(axes: AxisFacts) -> list[SliceLink]:
    """Return a link for each slice or padding (or window: of its last row) of a dimension with exactly one axis."""
    links = []
    for node, signature in axes.signatures.items():
        for label, window in signature.windows.items():
            source = axes.table.resolve(axes.labels[node][window.source])
            target = axes.table.resolve(axes.labels[node][label])
            if len(source) == len(target) == 1:
                links.append(SliceLink(source[0], target[0], window.start + window.reach, node in axes.static))
    return links
