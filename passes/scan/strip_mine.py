"""Rewrite blocks of rows that a loop slices and concatenates one by one: select them from a block dimension.

    x[:, 0:4], x[:, 4:8], x[:, 8:12]                ->   v[:, 0], v[:, 1], v[:, 2]   of v = x[:, 0:12].view(b, 3, 4)
    cat([a, b, c, rest], 1)                         ->   cat([stack([a, b, c], 1).view(b, 12), rest], 1)
    slice_backward(a, 0:4) + slice_backward(b, 4:8) + ...   ->   of a stack, likewise: the gradient of the first line

A *block* is a slice of several rows that a loop processes in one step. With a block dimension, the loop selects one index per
step, and can be found like a loop over rows. The rewrite applies if there are as many slices of one size as concatenated
blocks. The first or the last slice may be missing: the state after the last block is unused, and so are values computed only
for it. Blocks that no recurrence uses are restored.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from streamfx.ir.joint import JointGraph, bound_arguments, int_argument, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.axes import widths
from streamfx.passes.ops.row_maps import MIN_LOOP_ROWS, PaddedSum, RowSlice, is_static_shape, padded_sums, row_read
from streamfx.passes.scan.row_access import with_plus_zeros

aten = torch.ops.aten


@dataclass(frozen=True)
class Blocks:
    """The first `count` blocks of `size` rows each, along dimension `dim`: rows [0, size), [size, 2 * size), ..."""

    dim: int
    count: int
    size: int

    @property
    def rows(self) -> int:
        """The number of rows of all blocks."""
        return self.count * self.size

    @property
    def shape(self) -> BlockShape:
        """The blocks without their dimension."""
        return BlockShape(self.count, self.size)


class BlockShape(NamedTuple):
    """The number of blocks, and the rows of each."""

    num_blocks: int
    size: int


@dataclass(frozen=True)
class StackedBlocks:
    """The views that the rewrite inserted, with their blocks.

    `sliced`: views with a block dimension, from which blocks are selected. `concatenated`: views that flatten stacked blocks.
    """

    sliced: tuple[tuple[fx.Node, Blocks], ...]
    concatenated: tuple[tuple[fx.Node, Blocks], ...]


def stack_sliced_blocks(joint: JointGraph, writer: GraphWriter) -> StackedBlocks:
    """Rewrite blocks of rows, in place, if a value is sliced into as many blocks of the same size as another concatenates.

    x[:, 0:4], x[:, 4:8] -> v[:, 0], v[:, 1];  cat([a, b], 1) -> stack([a, b], 1).view(...)
    Blocks along feature dimensions are not rewritten. Return the views that were inserted (no views if nothing matches).
    """
    graph = joint.graph
    concats = {
        node: blocks
        for node in graph.find_nodes(op="call_function", target=aten.cat.default)
        if (blocks := _leading_blocks(node))
    }
    block_shapes = {blocks.shape for blocks in concats.values()}
    slices_by_range = _sliced_row_ranges(graph) if block_shapes else {}
    sliced_blocks = {
        source: blocks
        for source, ranges in slices_by_range.items()
        if (blocks := _matching_blocks(ranges, shape_of_node(source), block_shapes))
    }
    if sliced_blocks:
        is_feature_dim = widths(joint)
        sliced_blocks = {source: blocks for source, blocks in sliced_blocks.items() if not is_feature_dim(source, blocks.dim)}
    block_shapes &= {blocks.shape for blocks in sliced_blocks.values()}
    if not block_shapes:
        return StackedBlocks((), ())
    concatenated = [
        (_stack_concat_operands(node, blocks, _concat_operands(node)[: blocks.count], writer), blocks)
        for node, blocks in concats.items()
        if blocks.shape in block_shapes
    ]
    concatenated += _rewrite_gradient_sums(graph, block_shapes, writer)
    return StackedBlocks(
        tuple(
            (_select_blocks_from_view(source, own_blocks, slices_by_range[source], writer), own_blocks)
            for source, own_blocks in sliced_blocks.items()
        ),
        tuple(concatenated),
    )


def restore_unused_blocks(blocks: StackedBlocks, graph: fx.Graph, writer: GraphWriter) -> None:
    """Undo the rewrite of blocks that no recurrence uses, in place: v[:, 1] -> x[:, 4:8]; stack([a, b]).view(...) -> cat([a, b]).

    Recurrences read the views directly, and replaced the stacks that they compute.
    """
    remaining = set(graph.nodes)
    for view, own_blocks in blocks.sliced:
        for node in list(view.users) if view in remaining else ():
            if node.target is aten.select.int and node.args[1] == own_blocks.dim:
                start = int_argument(node, 2) * own_blocks.size
                rows = writer.move_before(node).rows(node_argument(view), own_blocks.dim, start, start + own_blocks.size)
                node.replace_all_uses_with(rows, propagate_meta=False)
    for view, own_blocks in blocks.concatenated:
        if (
            view in remaining
            and (stacked := node_argument(view)).target is aten.stack.default
            and stacked.args[1] == own_blocks.dim
        ):
            view.replace_all_uses_with(
                writer.move_before(view).call(aten.cat.default, stacked.args[0], own_blocks.dim), propagate_meta=False
            )


# -- slices


def _sliced_row_ranges(graph: fx.Graph) -> dict[fx.Node, dict[RowSlice, list[fx.Node]]]:
    """Return, for each value, the row slices that are read from it (by `slice` or `split`), each with the nodes that read it.

    For a = x[:, 0:4]: {x: {RowSlice(dim=1, start=0, stop=4): [a]}}. Slices without static bounds are omitted.
    """
    ranges: dict[fx.Node, dict[RowSlice, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in sorted(graph.nodes, key=lambda node: node.target is operator.getitem):  # slices before outputs of splits
        read = row_read(node)
        if read is not None and not read.is_single and read.rows.is_static and is_static_shape(shape_of_node(read.tensor)):
            ranges[read.tensor][read.rows].append(node)
    return ranges


def _matching_blocks(
    row_ranges: Collection[RowSlice], shape: Sequence[Any], block_shapes: Collection[BlockShape]
) -> Blocks | None:
    """Return blocks with one of `block_shapes`, each in `row_ranges`; the first or the last block may be missing.

    None if there are none. `row_ranges`: the slices of one value; `shape`: the value's shape.
    """
    for dim in sorted({dim for dim, _, _ in row_ranges}):
        for count, size in sorted(block_shapes, reverse=True):
            missing = [index for index in range(count) if RowSlice(dim, index * size, index * size + size) not in row_ranges]
            if missing in ([], [0], [count - 1]) and count * size <= shape[dim]:
                return Blocks(dim, count, size)
    return None


def _select_blocks_from_view(
    source: fx.Node, blocks: Blocks, slices_by_range: Mapping[RowSlice, Sequence[fx.Node]], writer: GraphWriter
) -> fx.Node:
    """x[:, 0:4], x[:, 4:8] -> v[:, 0], v[:, 1] of v = x[:, 0:8].view(b, 2, 4), in place; return v.

    `source` is x; `slices_by_range` has the nodes that read each slice of it.
    """
    writer.move_before(source.next)
    shape = [int(size) for size in shape_of_node(source)]
    rows = source if shape[blocks.dim] == blocks.rows else writer.rows(source, blocks.dim, 0, blocks.rows)
    in_blocks = [*shape[: blocks.dim], blocks.count, blocks.size, *shape[blocks.dim + 1 :]]
    view = writer.call(aten.view.default, rows, in_blocks)
    for index in range(blocks.count):
        start = index * blocks.size
        for node in slices_by_range.get(RowSlice(blocks.dim, start, start + blocks.size), ()):
            block = writer.move_before(node).call(aten.select.int, view, blocks.dim, index)
            node.replace_all_uses_with(block, propagate_meta=False)
    for row_range, nodes in slices_by_range.items():  # outputs of a split after the blocks
        for node in nodes:
            if node.target is operator.getitem and node.users:
                node.replace_all_uses_with(writer.move_before(node).rows(source, *row_range), propagate_meta=False)
    return view


# -- concatenations


def _concat_operands(node: fx.Node) -> list[fx.Node]:
    """Return the values that a concatenation joins."""
    return list(node.args[0])  # type: ignore[arg-type]


def _leading_blocks(node: fx.Node) -> Blocks | None:
    """Return the blocks of equal size with which a concatenation begins, as Blocks(dim, 3, 4) for operands of 4, 4, 4, 2 rows.

    None if these are fewer than `MIN_LOOP_ROWS`, if sizes are dynamic, or if dtypes or ranks differ.
    """
    operands = _concat_operands(node)
    dim = bound_arguments(node)["dim"] % len(shape_of_node(node))
    if not all(
        is_static_shape(shape_of_node(part)) and len(shape_of_node(part)) == len(shape_of_node(node)) for part in operands
    ):
        return None
    sizes = [int(shape_of_node(part)[dim]) for part in operands]
    count = next((index for index, size in enumerate(sizes) if size != sizes[0]), len(sizes))
    has_one_dtype = len({part.meta[VALUE].dtype for part in operands}) == 1
    return Blocks(dim, count, sizes[0]) if has_one_dtype and sizes[0] > 0 and count >= MIN_LOOP_ROWS else None


def _stack_concat_operands(node: fx.Node, blocks: Blocks, values: Sequence[fx.Node], writer: GraphWriter) -> fx.Node:
    """cat([a, b, rest]) -> cat([stack([a, b]).view(...), rest]), in place; return the view. `node`: the cat; `values`: a, b."""
    view = _stack_blocks(values, blocks, writer.move_before(node))
    rest = _concat_operands(node)[blocks.count :]
    concatenated = writer.call(aten.cat.default, [view, *rest], blocks.dim) if rest else view
    node.replace_all_uses_with(concatenated, propagate_meta=False)
    return view


def _stack_blocks(values: Sequence[fx.Node | None], blocks: Blocks, writer: GraphWriter) -> fx.Node:
    """Emit the concatenation of blocks as a view of their stack, and return the view. A block that is None becomes zeros."""
    like = next(value.meta[VALUE] for value in values if value is not None)
    shape = [int(size) for size in like.shape]
    has_missing = None in values
    zeros = writer.call(aten.full.default, shape, 0, dtype=like.dtype, device=like.device) if has_missing else None
    stacked = writer.call(aten.stack.default, [zeros if value is None else value for value in values], blocks.dim)
    return writer.call(aten.view.default, stacked, [*shape[: blocks.dim], blocks.rows, *shape[blocks.dim + 1 :]])


# -- gradients of slices


def _rewrite_gradient_sums(
    graph: fx.Graph, block_shapes: Collection[BlockShape], writer: GraphWriter
) -> list[tuple[fx.Node, Blocks]]:
    """slice_backward(a, 0:4) + slice_backward(b, 4:8) -> stack([a, b]).view(...), in place, for each sum of all blocks.

    Return the views, each with its blocks.
    """
    concatenated: list[tuple[fx.Node, Blocks]] = []
    for padded_sum in padded_sums(graph, aten.slice_backward.default):
        shape = shape_of_node(padded_sum.total)
        blocks = _matching_blocks(padded_sum.padded, shape, block_shapes) if is_static_shape(shape) else None
        if blocks is not None:
            concatenated += _stack_gradients(padded_sum, blocks, writer)
    return concatenated


def _stack_gradients(padded_sum: PaddedSum, blocks: Blocks, writer: GraphWriter) -> list[tuple[fx.Node, Blocks]]:
    """Replace a sum of zero-padded gradients of blocks by stacks of the gradients, plus the other addends, in place.

    If each block has n gradients, these come from n loops, in the order of the graph: one stack for each. Return the views of
    the stacks; none, and no change, if blocks differ in their number of gradients.
    """
    node, padded, others = padded_sum
    block_ranges = [RowSlice(blocks.dim, index * blocks.size, index * blocks.size + blocks.size) for index in range(blocks.count)]
    gradients_by_block = [padded.get(row_range, []) for row_range in block_ranges]
    counts = {len(gradients) for gradients in gradients_by_block if gradients}
    if len(counts) != 1:
        return []
    shape = list(node.meta[VALUE].shape)
    rows = [[gradients[index].part if gradients else None for gradients in gradients_by_block] for index in range(counts.pop())]
    rows[0] = with_plus_zeros(rows[0], node, writer)
    writer.move_before(node)
    views = [_stack_blocks(values, blocks, writer) for values in rows]
    pad = (blocks.dim, 0, blocks.rows, 1)  # dimension, start, end, step
    summands = [
        view if shape[blocks.dim] == blocks.rows else writer.call(aten.slice_backward.default, view, shape, *pad)
        for view in views
    ]
    summands += [move.tensor for row_range, moves in padded.items() if row_range not in block_ranges for move in moves]
    summands += others
    total = summands[0]
    for summand in summands[1:]:
        total = writer.call(aten.add.Tensor, total, summand)
    node.replace_all_uses_with(total, propagate_meta=False)
    return [(view, blocks) for view in views]
