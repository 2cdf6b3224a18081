"""Simplify concatenations with known rows: empty tensors, constants, and single rows.

A concatenation along the sequence needs all of its operands. A pad or a `where` is computed chunk by chunk.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.sizes import simplified
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.ops.row_maps import MOVES_ROWS, Piece, RowMove, RowSlice, find_sources, row_read, row_write
from streamfx.passes.rewrite.pattern import REST, op, rewrite_rule

aten = torch.ops.aten


@dataclass(frozen=True)
class _Concat:
    """The non-empty operands of a concatenation, and the dimension along which they are concatenated."""

    operands: list[fx.Node]
    dim: int
    rank: int  # of the result
    is_float: bool  # all operands have the floating-point dtype of the result

    @property
    def is_pair(self) -> bool:
        """Whether there are exactly two operands, both computed (no constants), and `dim` is not the last dimension."""
        computed = [operand for operand in self.operands if find_fill(operand) is None]
        return self.is_float and len(computed) == len(self.operands) == 2 and self.dim < self.rank - 1


def _match_concat(node: fx.Node) -> _Concat:
    """Return the non-empty operands and the dimension (nonnegative) of a `cat` node."""
    all_operands: Any = node.args[0]
    nonempty = [operand for operand in all_operands if 0 not in shape_of_node(operand)]
    rank, dtype = len(shape_of_node(node)), node.meta[VALUE].dtype
    is_float = all(operand.meta[VALUE].dtype == dtype and dtype.is_floating_point for operand in nonempty)
    return _Concat(nonempty, bound_arguments(node)["dim"] % rank if rank else 0, rank, is_float)


@rewrite_rule(op(aten.stack.default, "parts", ...))
def cast_parts_of_stack(node: fx.Node, writer: GraphWriter, parts: Sequence[fx.Node]) -> fx.Node | None:
    """stack([x, y]) -> stack([x.double(), y]) of float32 x and float64 y: each part, and some of them, have the dtype of all."""
    dtype = node.meta[VALUE].dtype
    if all(part.meta[VALUE].dtype == dtype for part in parts):
        return None
    cast = [part if part.meta[VALUE].dtype == dtype else writer.call(aten._to_copy.default, part, dtype=dtype) for part in parts]
    return writer.call(aten.stack.default, cast, bound_arguments(node)["dim"])


@rewrite_rule(aten.cat.default)
def remove_cat_with_empty(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([empty, x]) -> clone(x)

    Keys are concatenated with an empty cache in this way.
    """
    operands = _match_concat(node).operands
    is_copy = len(operands) == 1 and operands[0].meta[VALUE].dtype == node.meta[VALUE].dtype
    return writer.call(aten.clone.default, operands[0]) if is_copy else None


@rewrite_rule(aten.cat.default)
def cat_of_slices_to_value(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([x[:2], x[2:]]) -> x

    Also if the slices are cut from a concatenation, or from a buffer into which rows of x were written.
    """
    concat = _match_concat(node)
    is_sliced = [is_kind(operand, Kind.SLICE, Kind.CONCAT) or operand.target is operator.getitem for operand in concat.operands]
    piece = _only_piece(node, concat.dim, concat.operands[0]) if len(is_sliced) > 1 and all(is_sliced) else None
    return None if piece is None or piece.is_added else piece.value  # type: ignore[return-value]


@rewrite_rule(
    op(
        aten.add.Tensor,
        op(aten.slice_backward.default, REST, name="first"),
        op(aten.slice_backward.default, REST, name="second"),
    )
)
def sum_of_padded_slices_to_value(node: fx.Node, writer: GraphWriter, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """slice_backward(x[:2], 0, 2) + slice_backward(x[2:], 2, 4) -> x + 0.0"""
    write, *others = (row_write(gradient) for gradient in (first, second))
    if write is None or any(other is not None and _is_separate_value(other) for other in (write, *others)):
        return None
    piece = _only_piece(node, write.rows.dim, write.part)
    return None if piece is None else writer.call(aten.add.Tensor, piece.value, 0.0)


def _is_separate_value(write: RowMove) -> bool:
    """Return whether a write fills some rows, not all, with a value that consists of no other value's rows.

    This is a quick check: the gradient of a rotary embedding is a sum of two such writes.
    """
    num_rows, length = write.rows.stop - write.rows.start, shape_of_node(write.tensor)[write.rows.dim]
    is_static = isinstance(num_rows, int) and isinstance(length, int)
    return is_static and 0 < num_rows < length and write.part.target not in MOVES_ROWS


def _only_piece(node: fx.Node, dim: int, part: fx.Node) -> Piece | None:
    """Return the piece of a value that consists of all rows of one other value; None if it consists of anything else.

    If `part`, which is part of the value, is a slice, the other value is its operand.
    """
    length, read = shape_of_node(node)[dim], row_read(part)
    sliced = None if read is None else read.tensor
    pieces = find_sources(node, RowSlice(dim, 0, length), sliced) if isinstance(length, int) else []
    is_value = len(pieces) == 1 and pieces[0].has_all_rows(dim) and not pieces[0].is_row
    return pieces[0] if is_value and pieces[0].value is not node else None


@rewrite_rule(aten.cat.default)
def cat_with_constant_to_pad(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([zeros, x]) -> pad(x, before)"""
    concat = _match_concat(node)
    fills = [find_fill(operand) for operand in concat.operands]  # the constant of each operand; None: not a constant
    computed = [i for i, fill in enumerate(fills) if fill is None]
    numbers = {(fill, math.copysign(1.0, fill)) for fill in fills if fill is not None}  # 0.0 and -0.0 are different
    if len(computed) != 1 or len(numbers) != 1 or not concat.is_float:
        return None
    (i,) = computed
    sides = concat.operands[:i], concat.operands[i + 1 :]
    before, after = (sum(operand.meta[VALUE].shape[concat.dim] for operand in side) for side in sides)
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    pad = [0, 0] * (concat.rank - 1 - concat.dim) + [before, after]
    return writer.call(aten.constant_pad_nd.default, concat.operands[i], pad, numbers.pop()[0])


@rewrite_rule(aten.cat.default)
def token_shift_to_where(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([row, x[:-1]]) -> where(arange == 0, row padded to index 0, pad(x[:-1], before))

    If one row comes before or after the others, both operands are padded and `where` selects one of them.
    """
    concat = _match_concat(node)
    lengths = [shape_of_node(operand)[concat.dim] for operand in concat.operands] if concat.is_pair else []
    if [length == 1 for length in lengths].count(True) != 1 or not all(isinstance(length, int) for length in lengths):
        return None
    row_operand = lengths.index(1)  # 0: the row comes before the others, 1: after them
    row, other_rows = concat.operands[row_operand], concat.operands[1 - row_operand]
    if not is_kind(other_rows, Kind.SLICE) or bound_arguments(other_rows)["dim"] % concat.rank != concat.dim:
        return None
    shape = list(node.meta[VALUE].shape)
    row_index = 0 if row_operand == 0 else lengths[0]
    pad = [0, 0] * (concat.rank - 1 - concat.dim) + ([1, 0] if row_operand == 0 else [0, 1])
    other_rows = writer.call(aten.constant_pad_nd.default, other_rows, pad, 0.0)
    row = writer.call(aten.slice_backward.default, row, shape, concat.dim, row_index, row_index + 1, 1)
    indices = writer.call(aten.arange.default, sum(lengths), device=node.meta[VALUE].device)
    column_of_indices = writer.call(aten.view.default, indices, [-1] + [1] * (concat.rank - 1 - concat.dim))
    return writer.call(aten.where.self, writer.call(aten.eq.Scalar, column_of_indices, row_index), row, other_rows)


@rewrite_rule(aten.slice_scatter.default)
def slice_scatter_to_pad(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """slice_scatter(zeros, x, 0, 1, 3) -> pad(x, before and after)"""
    write = row_write(node)
    fill = None if write is None else find_fill(write.rest)  # the constant of all rows that are not written
    if write is None or fill is None or not node.meta[VALUE].is_floating_point():
        return None
    dim, start, stop = write.rows
    after = simplified(shape_of_node(node)[dim] - stop)
    if not isinstance(start, int) or not isinstance(after, int) or after < 0:
        return None
    pad = [0, 0] * (len(shape_of_node(node)) - 1 - dim) + [start, after]
    return writer.call(aten.constant_pad_nd.default, write.part, pad, fill)
