"""Replace relative scores that models align with keys by reshaping: a view with a different row length shifts each row.

    x [t w] -> view [w t] -> without the first row -> view [t, w - 1] -> the first n columns     is  y[i, j] = x[i, t - i + j]

After the end of a row, the view continues with the next row. Later passes decide whether such elements are masked.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, is_size, node_argument, shape_of_node
from streamfx.ir.sizes import Size, is_at_least, product, size_of
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.traits import before_copies
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.iota_index import INDEX_DTYPES, VIEWS, is_arange
from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD

aten = torch.ops.aten


@rewrite_rule(aten.index_select.default, aten.index_add.default)
def index_by_arange_to_slice(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_select(x, dim, arange(n)) -> x[:n],  index_add(zeros, dim, arange(n), y) -> pad(y + 0.0, after)

    Applies along any dimension that has at least n rows.
    """
    arguments = bound_arguments(node)
    base, index = arguments["self"], arguments["index"]
    if not is_arange(index) or index.meta[VALUE].dtype not in INDEX_DTYPES or not (shape := shape_of_node(base)):
        return None
    dim, (count,) = arguments["dim"] % len(shape), shape_of_node(index)
    ends = (0, size_arguments(index, writer)[0])
    if not is_at_least(shape[dim], count):
        return None
    if node.target is aten.index_select.default:
        return writer.call(aten.slice.Tensor, base, dim, *ends)
    source, dtype = arguments["source"], node.meta[VALUE].dtype
    is_pad = is_zero(base) and arguments["alpha"] == 1 and source.meta[VALUE].dtype == dtype and dtype.is_floating_point
    if not is_pad or shape_of_node(source) != (*shape[:dim], count, *shape[dim + 1 :]):
        return None
    added = writer.call(aten.add.Tensor, source, 0.0)  # zero plus -0 is zero
    return writer.call(aten.slice_backward.default, added, size_arguments(base, writer), dim, *ends, 1)


@rewrite_rule(*VIEWS, aten.slice.Tensor)
def reshapes_to_relative_shift(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """view(view(x [t w], [w t])[1:], [t, w - 1]) -> relative_shift(x, t, w - 1)

    The last view is the identity if there are as many columns as rows.
    """
    sliced = node if node.target is aten.slice.Tensor else before_copies(node_argument(node))
    if sliced.target is not aten.slice.Tensor or (reshaped := before_copies(node_argument(sliced))).target not in VIEWS:
        return None
    x, arguments = node_argument(reshaped), bound_arguments(sliced)
    dim = arguments["dim"] % len(shape_of_node(sliced))
    if not _is_shift(arguments, shape_of_node(x), shape_of_node(reshaped), shape_of_node(node)):
        return None
    rows, width = size_arguments(x, writer)[dim : dim + 2]
    return writer.call(RELATIVE_SHIFT, x, dim, rows, _plus(width, -1, writer))


@rewrite_rule(*VIEWS)
def reshapes_to_relative_shift_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """view(slice_backward(view(dy [t, w - 1], [w - 1, t]), [w t], 1), [t w]) -> relative_shift_backward(dy, t, w)"""
    padded = before_copies(node_argument(node))
    if padded.target is not aten.slice_backward.default:
        return None
    inner, arguments = node_argument(padded), bound_arguments(padded)
    dim = arguments["dim"] % len(shape_of_node(padded))
    candidates = (inner, node_argument(view)) if (view := before_copies(inner)).target in VIEWS else (inner,)
    shapes = shape_of_node(node), shape_of_node(padded)
    gradient = next((value for value in candidates if _is_shift(arguments, *shapes, shape_of_node(value))), None)
    if gradient is None:
        return None
    rows, columns = size_arguments(gradient, writer)[dim : dim + 2]
    return writer.call(RELATIVE_SHIFT_BACKWARD, gradient, dim, rows, _plus(columns, 1, writer))


def _plus(size: Any, number: int, writer: GraphWriter) -> Any:
    """Return the sum of a size and an integer, as an integer or a node."""
    return size + number if isinstance(size, int) else writer.call(operator.add, size, number)


def _is_shift(slice_arguments: dict[str, Any], x: tuple[Size, ...], reshaped: tuple[Size, ...], result: tuple[Size, ...]) -> bool:
    """Return whether reading x [t w] as `reshaped`, without its first t elements, as `result` [t, w - 1] shifts each row.

    Element j of row i is then element t + i * (w - 1) + j of x: index t - i + j of row i, continued into the next row.
    """
    dim, start = slice_arguments["dim"] % len(x), slice_arguments["start"]
    if (
        not len(x) == len(reshaped) == len(result)
        or dim + 1 >= len(x)
        or slice_arguments["step"] != 1
        or not isinstance(start, int)
    ):
        return False
    pairs = slice(dim, dim + 2)
    other_sizes = [(*shape[:dim], *shape[dim + 2 :]) for shape in (x, reshaped, result)]
    (rows, width), (result_rows, columns) = x[pairs], result[pairs]
    return (
        other_sizes[0] == other_sizes[1] == other_sizes[2]
        and rows == result_rows
        and columns + 1 == width
        and product(reshaped[pairs]) == product(x[pairs])
        and product((start, reshaped[dim + 1])) == rows
    )


@rewrite_rule(aten.slice.Tensor)
def merge_slice_into_relative_shift(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """relative_shift(x, first, w)[:, :n] -> relative_shift(x, first, n)"""
    arguments, shift = bound_arguments(node), node_argument(node)
    if shift.target is not RELATIVE_SHIFT or (ends := _first_columns(arguments, shift, shape_of_node(node))) is None:
        return None
    x, dim, first, _ = shift.args
    return writer.call(RELATIVE_SHIFT, x, dim, first, ends)


@rewrite_rule(RELATIVE_SHIFT_BACKWARD)
def merge_slice_backward_into_relative_shift(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """relative_shift_backward(slice_backward(dy, :n), first, w) -> relative_shift_backward(dy, first, w)"""
    padded = before_copies(node_argument(node))
    if padded.target is not aten.slice_backward.default:
        return None
    gradient = node_argument(padded)
    if _first_columns(bound_arguments(padded), node, shape_of_node(gradient)) is None:
        return None
    return writer.call(RELATIVE_SHIFT_BACKWARD, gradient, *node.args[1:])


def _first_columns(slice_arguments: dict[str, Any], shift: fx.Node, shape: tuple[Size, ...]) -> Any:
    """Return, as an argument, the number of a shift's first columns that a slice keeps; None if it is any other slice."""
    column, end = int_argument(shift, 1) + 1, slice_arguments["end"]
    if slice_arguments["dim"] % len(shape) != column or slice_arguments["start"] not in (None, 0) or slice_arguments["step"] != 1:
        return None
    if isinstance(shape[column], int):
        return shape[column]
    return end if is_size(end) and size_of(end.meta[VALUE]) == shape[column] else None
