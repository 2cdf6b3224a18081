"""Replace reads of a buffer that was written block by block by the written values.

    y[0:3] = a; y[3:6] = b; y[6:9] = c      as three slice_scatter, each of the previous one's result

    y[3:6]         ->  b                    rows that one operator has written
    y[0:9]         ->  cat([a, b, c])       rows of several values, each read completely
    y.view(3, 3)   ->  stack([a, b, c])     blocks of one size, in a separate dimension

A loop over blocks stores its states like this, and autograd slices their gradients in the same way. The last write of
each row is found by following the chain of writes, if all bounds are integers; rows without a write are the buffer's own.
A *piece* is an interval of the buffer's rows, with the value that was written there. `dim` is the dimension of rows.
"""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.row_maps import OVERWRITES, Piece, RowMove, RowSlice, find_pieces, is_static_shape, row_read
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten
SLICED = OVERWRITES | {aten.slice_backward.default, aten.add.Tensor}
MIN_PIECES = 3  # fewer pieces cannot be rerolled into a loop (`passes/scan/row_access.py`)


@rewrite_rule(*of_kind(Kind.SLICE))
def slice_of_writes_to_cat(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """y[0:9] -> cat([a, b, c]), if a, b and c were written into y at 0, 3 and 6

    Also y[3:5] -> b[0:2], and rows that were never written. Does not apply if the result would concatenate parts of values.
    """
    read = row_read(node) if node_argument(node).target in SLICED else None
    if read is None or not read.rows.is_static or not is_static_shape(shape_of_node(read.tensor)):
        return None
    pieces = find_pieces(read.tensor, read.rows)
    if len(pieces) == 1:
        return None if pieces[0].value is read.tensor else emit_piece(pieces[0], read, writer)
    return _emit_concat(pieces, read, writer)


@rewrite_rule(aten.slice_scatter.default)
def writes_to_cat(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """y -> cat([a, b, c]), if a, b and c were written into y, which has nine rows, at 0, 3 and 6

    Applies if y has a user that is neither a write into y nor a slice.
    """
    shape, dim = shape_of_node(node), bound_arguments(node)["dim"]
    if all(_writes_into(node, user) or is_kind(user, Kind.SLICE) for user in node.users) or not is_static_shape(shape):
        return None
    rows = RowSlice(dim % len(shape), 0, shape[dim])
    return _emit_concat(find_pieces(node, rows), RowMove(node, rows, node, is_single=False, rest=None), writer)


@rewrite_rule(*of_kind(Kind.RESHAPE))
def view_of_cat_to_stack(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([a, b, c]).view(3, k) -> stack([a, b, c])

    Applies if the three values have k rows each.
    """
    concat = node_argument(node)
    if concat.target is not aten.cat.default:
        return None
    shape, parts = shape_of_node(concat), list[fx.Node](concat.args[0])  # type: ignore[arg-type]
    dim = bound_arguments(concat)["dim"] % len(shape)
    part_shapes = {shape_of_node(part) for part in parts}
    part_length = shape_of_node(parts[0])[dim]
    stacked_shape = (*shape[:dim], len(parts), part_length, *shape[dim + 1 :])
    splits_into_parts = len(part_shapes) == 1 and len(parts) >= MIN_PIECES and shape_of_node(node) == stacked_shape
    if not splits_into_parts or not all(has_same_type(part, node) for part in parts):
        return None
    return writer.call(aten.stack.default, parts, dim)


def emit_piece(piece: Piece, read: RowMove, writer: GraphWriter) -> fx.Node | None:
    """Emit the rows of a piece, which replace rows that `read` reads; None for a constant that is not floating point."""
    dim, like = read.rows.dim, read.part.meta[VALUE]
    if not isinstance(piece.value, fx.Node):
        return _emit_constant(piece, read, writer)
    rows = piece.value
    if not read.is_single and piece.is_row:
        rows = writer.call(aten.unsqueeze.default, rows, dim)
    elif read.is_single and not piece.is_row:
        rows = writer.call(aten.select.int, rows, dim, piece.start)
    elif not piece.has_all_rows(dim):
        rows = writer.rows(rows, dim, piece.start, piece.start + piece.num_rows)
    return writer.call(aten.add.Tensor, rows, 0.0) if piece.is_added and like.is_floating_point() else rows


def _emit_concat(pieces: list[Piece], read: RowMove, writer: GraphWriter) -> fx.Node | None:
    """Emit the concatenation of pieces, which replaces the rows that `read` reads.

    Return None if there are fewer than `MIN_PIECES`, if fewer than two of them are values, or if a piece is a part of a value,
    a single row, or a summand.
    """
    values = [piece for piece in pieces if isinstance(piece.value, fx.Node)]
    is_complete = all(not piece.is_row and not piece.is_added and piece.has_all_rows(read.rows.dim) for piece in values)
    if len(pieces) < MIN_PIECES or len(values) < 2 or not is_complete:
        return None
    parts = [emit_piece(piece, read, writer) for piece in pieces]
    return None if None in parts else writer.call(aten.cat.default, parts, read.rows.dim)


def _emit_constant(piece: Piece, read: RowMove, writer: GraphWriter) -> fx.Node | None:
    """Emit rows filled with the piece's constant, shaped like the rows that `read` reads except along their dimension.

    None if they are not floating point.
    """
    value = read.part.meta[VALUE]
    if not value.is_floating_point():
        return None
    shape = size_arguments(read.part, writer)
    if not read.is_single:
        shape[read.rows.dim] = piece.num_rows
    return writer.call(aten.full.default, shape, piece.value, dtype=value.dtype, device=value.device)


def _writes_into(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a user writes rows into this node (rather than writing this node into another buffer)."""
    return user.target in OVERWRITES and node_argument(user) is node and node_argument(user, 1) is not node
