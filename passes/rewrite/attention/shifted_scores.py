"""Replace relative scores that models align with keys by reshaping: a view with a different row length shifts each row.

    x [t w] -> view [w t] -> without the first row -> view [t, w - 1] -> the first n columns     is  y[i, j] = x[i, t - i + j]

x[i, k] is the score of row i for relative position k; y[i, j] is its score for key j. After the end of a row, the view
continues with the next row. Later passes decide whether such elements are masked. The operators are
`relative_shift(x, dim, first, columns)`, where `dim` is the dimension of rows and `first` is t, and its backward.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.ir.joint import bound_arguments, int_argument, is_size, node_argument, shape_of_node
from streamfx.ir.operator_table import COPIES, Kind, is_kind, of_kind
from streamfx.ir.sizes import Size, is_at_least, product, size_of
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.row_maps import RowMove, row_read, row_write
from streamfx.passes.ops.traits import before_copies
from streamfx.passes.rewrite.pattern import REST, Through, op, rewrite_rule
from streamfx.passes.rewrite.views.iota_index import INDEX_DTYPES, is_arange

aten = torch.ops.aten
RESHAPES = of_kind(Kind.RESHAPE)
SLICES = of_kind(Kind.SLICE)
SLICED = op(SLICES, Through(COPIES, op(RESHAPES, "x", REST, name="reshaped")), "dim", "start", ...)
PADDED = ("unpadded", ..., "dim", "start", ..., 1)  # arguments of a `slice_backward` with step 1


@rewrite_rule(aten.index_select.default, aten.index_add.default)
def index_by_arange_to_slice(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_select(x, dim, arange(n)) -> x[:n],  index_add(zeros, dim, arange(n), y) -> pad(y + 0.0, after)

    Applies along any dimension that has at least n rows.
    """
    arguments = bound_arguments(node)
    base, index = arguments["self"], arguments["index"]
    if not is_arange(index) or index.meta[VALUE].dtype not in INDEX_DTYPES or not (shape := shape_of_node(base)):
        return None
    dim = arguments["dim"] % len(shape)
    (num_indices,) = shape_of_node(index)
    start_and_end = (0, size_arguments(index, writer)[0])
    if not is_at_least(shape[dim], num_indices):
        return None
    if node.target is aten.index_select.default:
        return writer.rows(base, dim, *start_and_end)
    added, dtype = arguments["source"], node.meta[VALUE].dtype
    is_pad = is_zero(base) and arguments["alpha"] == 1 and added.meta[VALUE].dtype == dtype and dtype.is_floating_point
    if not is_pad or shape_of_node(added) != (*shape[:dim], num_indices, *shape[dim + 1 :]):
        return None
    plus_zero = writer.call(aten.add.Tensor, added, 0.0)  # zero plus -0 is zero
    return writer.call(aten.slice_backward.default, plus_zero, size_arguments(base, writer), dim, *start_and_end, 1)


@rewrite_rule(SLICED, op(RESHAPES, Through(COPIES, SLICED), REST))
def reshapes_to_relative_shift(
    node: fx.Node, writer: GraphWriter, x: fx.Node, reshaped: fx.Node, dim: int, start: Any
) -> fx.Node | None:
    """view(view(x [t w], [w t])[1:], [t, w - 1]) -> relative_shift(x, t, w - 1)

    The last view is the identity if there are as many columns as rows.
    """
    if not _is_shift(dim, start, shape_of_node(x), shape_of_node(reshaped), shape_of_node(node)):
        return None
    rows, width = size_arguments(x, writer)[dim : dim + 2]
    return writer.call(RELATIVE_SHIFT, x, dim, rows, _emit_size_plus(width, -1, writer))


@rewrite_rule(op(RESHAPES, Through(COPIES, op(aten.slice_backward.default, *PADDED, name="padded")), REST))
def reshapes_to_relative_shift_backward(
    node: fx.Node, writer: GraphWriter, unpadded: fx.Node, padded: fx.Node, dim: int, start: Any
) -> fx.Node | None:
    """view(slice_backward(view(dy [t, w - 1], [w - 1, t]), [w t], 1), [t w]) -> relative_shift_backward(dy, t, w)"""
    # the inner view is the identity, and missing, if there are as many columns as rows
    candidates = (unpadded, node_argument(view)) if is_kind(view := before_copies(unpadded), Kind.RESHAPE) else (unpadded,)
    shapes = shape_of_node(node), shape_of_node(padded)
    gradient = next((value for value in candidates if _is_shift(dim, start, *shapes, shape_of_node(value))), None)
    if gradient is None:
        return None
    rows, columns = size_arguments(gradient, writer)[dim : dim + 2]
    return writer.call(RELATIVE_SHIFT_BACKWARD, gradient, dim, rows, _emit_size_plus(columns, 1, writer))


def _emit_size_plus(size: Any, number: int, writer: GraphWriter) -> Any:
    """Return size + number: an integer, or a new node if the size is a node (a dynamic size)."""
    return size + number if isinstance(size, int) else writer.call(operator.add, size, number)


def _is_shift(dim: int, start: Any, x: tuple[Size, ...], reshaped: tuple[Size, ...], result: tuple[Size, ...]) -> bool:
    """Return whether a view, a slice and a view are a relative shift: view x [t w], slice off t elements, view the rest.

    `x` is the shape before, `reshaped` [.. w t] the shape that is sliced, and `result` [.. t, w - 1] the shape after. Element
    j of row i of the result is then element t + i * (w - 1) + j of x: index t - i + j of row i, continued into the next row.
    """
    if not len(x) == len(reshaped) == len(result) or dim + 1 >= len(x) or not isinstance(start, int):
        return False
    row_dims = slice(dim, dim + 2)  # the dimension of rows, and the dimension of elements within a row
    other_sizes = [(*shape[:dim], *shape[dim + 2 :]) for shape in (x, reshaped, result)]
    (rows, width), (result_rows, columns) = x[row_dims], result[row_dims]
    return (
        other_sizes[0] == other_sizes[1] == other_sizes[2]
        and rows == result_rows
        and columns + 1 == width
        and product(reshaped[row_dims]) == product(x[row_dims])
        and product((start, reshaped[dim + 1])) == rows
    )


@rewrite_rule(*SLICES)
def merge_slice_into_relative_shift(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """relative_shift(x, first, w)[:, :n] -> relative_shift(x, first, n)"""
    shift = node_argument(node)
    if shift.target is not RELATIVE_SHIFT or (num_columns := _num_first_columns(row_read(node), node, shift)) is None:
        return None
    x, dim, first, _ = shift.args
    return writer.call(RELATIVE_SHIFT, x, dim, first, num_columns)


@rewrite_rule(RELATIVE_SHIFT_BACKWARD)
def merge_slice_backward_into_relative_shift(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """relative_shift_backward(slice_backward(dy, :n), first, w) -> relative_shift_backward(dy, first, w)"""
    padded = before_copies(node_argument(node))
    if padded.target is not aten.slice_backward.default or _num_first_columns(row_write(padded), padded, node) is None:
        return None
    return writer.call(RELATIVE_SHIFT_BACKWARD, node_argument(padded), *node.args[1:])


def _num_first_columns(move: RowMove | None, node: fx.Node, shift: fx.Node) -> Any:
    """Return the number n of columns if a slice, or its backward `node`, keeps the first n columns of a relative shift.

    It is an integer, or the node of a dynamic size. Return None for any other slice.
    """
    if move is None or move.rows[:2] != (int_argument(shift, 1) + 1, 0):
        return None
    num_columns, end = move.rows.stop, bound_arguments(node)["end"]
    if isinstance(num_columns, int):
        return num_columns
    return end if is_size(end) and size_of(end.meta[VALUE]) == num_columns else None
