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

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.tile_views import is_static_shape, sliced_rows

aten = torch.ops.aten
ROW_WRITES = of_kind(Kind.OVERWRITE_ROWS)
MIN_PIECES = 3  # fewer pieces cannot be rerolled into a loop (`passes/scan/row_access.py`)
PADS = of_kind(Kind.PAD) | {aten.slice_backward.default}
WRITES_OR_EMBEDS = ROW_WRITES | {aten.slice_backward.default}
WRITES_OR_PADS = ROW_WRITES | PADS


@dataclass(frozen=True)
class _Piece:
    """Rows [row, row + num_rows) of a buffer, which hold a constant, or rows [start, start + num_rows) of `value`.

    If `is_row`, the value is a single row without the row dimension.
    """

    row: int
    num_rows: int
    value: fx.Node | float
    start: int
    is_row: bool = False

    def clip(self, low: int, high: int) -> _Piece:
        """Return the part of the piece in rows [low, high) of the buffer; if it is empty, `num_rows` is zero or negative."""
        begin, end = max(self.row, low), min(self.row + self.num_rows, high)
        return _Piece(begin, end - begin, self.value, self.start + begin - self.row, self.is_row)

    def has_all_rows(self, dim: int) -> bool:
        """Return whether the piece holds all rows of its value, whose dimension of rows is `dim`; False for a constant."""
        return isinstance(self.value, fx.Node) and self.num_rows == shape_of_node(self.value)[dim]


@rewrite_rule(aten.slice.Tensor)
def slice_of_writes_to_cat(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """y[0:9] -> cat([a, b, c]), if a, b and c were written into y at 0, 3 and 6

    Also y[3:5] -> b[0:2], and rows that were never written. Does not apply if the result would concatenate parts of values.
    """
    buffer = node_argument(node)
    rows = sliced_rows(node, buffer) if buffer.target in WRITES_OR_EMBEDS else None
    if rows is None or not is_static_shape(shape_of_node(buffer)):
        return None
    pieces = _find_pieces(buffer, *rows)
    if len(pieces) == 1:
        return None if pieces[0].value is buffer else _emit_piece(pieces[0], rows.dim, node, writer)
    return _emit_concat(pieces, rows.dim, node, writer)


@rewrite_rule(aten.slice_scatter.default)
def writes_to_cat(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """y -> cat([a, b, c]), if a, b and c were written into y, which has nine rows, at 0, 3 and 6

    Applies if y has a user that is neither a write into y nor a slice.
    """
    shape, dim = shape_of_node(node), bound_arguments(node)["dim"]
    if all(_writes_into(node, user) or user.target is aten.slice.Tensor for user in node.users) or not is_static_shape(shape):
        return None
    dim %= len(shape)
    pieces = _find_pieces(node, dim, 0, shape[dim])  # type: ignore[arg-type]
    return _emit_concat(pieces, dim, node, writer) if len(pieces) > 1 else None


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


def _emit_piece(piece: _Piece, dim: int, node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Emit and return the rows of a piece, with their row dimension; None for a constant if the buffer is not floating point.

    `node` is the read that the rows replace: a constant has its dtype and its other sizes.
    """
    if not isinstance(piece.value, fx.Node):
        return _emit_constant(piece, dim, node, writer)
    if piece.is_row:
        return writer.call(aten.unsqueeze.default, piece.value, dim)
    if piece.has_all_rows(dim):
        return piece.value
    return writer.call(aten.slice.Tensor, piece.value, dim, piece.start, piece.start + piece.num_rows)


def _emit_concat(pieces: list[_Piece], dim: int, node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Emit the concatenation of pieces, which replaces the read `node`.

    Return None if there are fewer than `MIN_PIECES`, if fewer than two of them are values, or if a piece is a part of a value
    or a single row.
    """
    values = [piece for piece in pieces if isinstance(piece.value, fx.Node)]
    if len(pieces) < MIN_PIECES or len(values) < 2 or not all(not piece.is_row and piece.has_all_rows(dim) for piece in values):
        return None
    parts = [_emit_piece(piece, dim, node, writer) for piece in pieces]
    return None if None in parts else writer.call(aten.cat.default, parts, dim)


def _emit_constant(piece: _Piece, dim: int, node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Emit rows filled with the piece's constant, shaped like `node` (the read) except along `dim`.

    None if the buffer is not floating point.
    """
    value, shape = node.meta[VALUE], list(shape_of_node(node))
    if not value.is_floating_point():
        return None
    shape[dim] = piece.num_rows
    return writer.call(aten.full.default, shape, piece.value, dtype=value.dtype, device=value.device)


# -- the last write of each row


def _find_pieces(value: fx.Node, dim: int, low: int, high: int) -> list[_Piece]:
    """Return the pieces that make up rows [low, high) of the buffer `value`, in order.

    Walk back over the writes that led to it. Each write fills the intervals of rows that no later write has filled
    (`open_rows`); a padding, a constant, or else the value before all writes fills the rest.
    """
    pieces: list[_Piece] = []
    open_rows = [(low, high)]
    fill: float | None = None  # the constant of all open rows, if it is known
    while open_rows and fill is None and (written_piece := _match_written_piece(value, dim)) is not None:
        still_open = []
        for begin, end in open_rows:
            piece = written_piece.clip(begin, end)
            if piece.num_rows <= 0:
                still_open.append((begin, end))
                continue
            pieces.append(piece)
            rest = (begin, piece.row), (piece.row + piece.num_rows, end)
            still_open += [(first_row, end_row) for first_row, end_row in rest if first_row < end_row]
        open_rows = still_open
        if value.target in PADS:
            fill = _padding_value(value)
        else:
            value = node_argument(value)
    fill = find_fill(value) if fill is None else fill
    pieces += [_Piece(begin, end - begin, value if fill is None else fill, begin) for begin, end in open_rows]
    return sorted(pieces, key=lambda piece: piece.row)


def _match_written_piece(node: fx.Node, dim: int) -> _Piece | None:
    """Return the rows of a buffer that one operator writes, or that a padding surrounds, along dimension `dim`.

    Return None for any other operator, or if it writes along another dimension, its bounds are not static, or it converts.
    """
    if node.target not in WRITES_OR_PADS:
        return None
    rows = node_argument(node, 1 if node.target in ROW_WRITES else 0)
    if not has_same_type(rows, node) or not is_static_shape(shape_of_node(rows)):
        return None
    if node.target is aten.constant_pad_nd.default:
        pads: Any = node.args[1]  # (before, after) for each dimension, the last one first
        pad_index = 2 * (len(shape_of_node(node)) - 1 - dim)
        before = pads[pad_index] if pad_index < len(pads) else 0
        is_padded_along_dim = all(pad == 0 for i, pad in enumerate(pads) if i not in (pad_index, pad_index + 1))
        is_padded_along_dim &= all(isinstance(pad, int) and pad >= 0 for pad in pads)
        return _Piece(before, shape_of_node(rows)[dim], rows, 0) if is_padded_along_dim else None  # type: ignore[arg-type]
    arguments, shape = bound_arguments(node), shape_of_node(node)
    if arguments["dim"] % len(shape) != dim:
        return None
    if node.target is aten.select_scatter.default:
        index = arguments["index"]
        return _Piece(index % shape[dim], 1, rows, 0, is_row=True) if isinstance(index, int) else None  # type: ignore[operator]
    written_rows = sliced_rows(node, node)
    other_sizes = (*shape[:dim], *shape[dim + 1 :])
    rows_shape = shape_of_node(rows)
    if written_rows is None or (*rows_shape[:dim], *rows_shape[dim + 1 :]) != other_sizes:
        return None
    num_rows = written_rows.stop - written_rows.start
    return _Piece(written_rows.start, num_rows, rows, 0) if rows_shape[dim] == num_rows else None


def _padding_value(node: fx.Node) -> float:
    """Return the number with which an operator in `PADS` surrounds its operand."""
    return 0.0 if node.target is aten.slice_backward.default else float(bound_arguments(node)["value"])


def _writes_into(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a user writes rows into this node (rather than writing this node into another buffer)."""
    return user.target in ROW_WRITES and node_argument(user) is node and node_argument(user, 1) is not node
