"""Simplify indices that count up: an index 0, 1, 2, ... takes each row once, an index 0, 0, 1, 1, ... takes each row twice.

x[0 1 2 ...] -> x                           zeros.index_add(0, [0 1 2 ...], y) -> y
x[0 0 1 1 2 2 ...] -> repeat(x, each 2)     zeros.index_add(0, [0 0 1 1 ...], y) -> y.view(n, 2).sum(1)
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, shape_of_node
from streamfx.ir.ranges import is_exact_in
from streamfx.ir.sizes import Size, is_at_least, product
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import CONSTANT, VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.ranges.transfer import max_size
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.clone.default)
INDEX_DTYPES = (torch.int64, torch.int32)  # dtypes of row indices
ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
ORDERS = (aten.argsort.default, aten.argsort.stable)
SORTS = (aten.sort.default, aten.sort.stable, aten.topk.default)  # they return values and their indices
MAX_LISTED_ROWS = 16  # largest index that is written as slices
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def simplify_arange_index(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Return a replacement for a look-up of rows, or for a sum into rows, if its index counts up; else None."""
    if node.target in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return _emit_lookup(node, writer)
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default):
        return _emit_sum_into(node, writer)
    return None


def _emit_lookup(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Emit the rows, or each row repeated, if the index of a look-up counts up; else return None."""
    rows, index = node_argument(node), find_row_index(node)
    times = None if index is None else find_repeats(index, shape_of_node(rows)[0])
    if index is None or times is None:
        return None
    if times == 1:
        return rows
    sizes = size_arguments(rows, writer)
    spread = writer.call(aten.expand.default, writer.call(aten.unsqueeze.default, rows, 1), [sizes[0], times, *sizes[1:]])
    copied = writer.call(aten.clone.default, spread, memory_format=torch.contiguous_format)
    return writer.call(aten.view.default, copied, [*size_arguments(index, writer), *sizes[1:]])


def _emit_sum_into(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Emit the sum of the rows with equal index, if rows are added to zeros and the index counts up; else return None."""
    arguments = bound_arguments(node)
    base, index = arguments["self"], find_row_index(node)
    rows = arguments["source"] if node.target is aten.index_add.default else arguments["values"]
    accumulates = arguments.get("accumulate", arguments.get("alpha") == 1)
    if index is None or not accumulates or not is_zero(base):
        return None
    times = find_repeats(index, shape_of_node(base)[0])
    expected = (*shape_of_node(index), *shape_of_node(base)[1:])
    dtype = node.meta[VALUE].dtype
    if times is None or shape_of_node(rows) != expected or rows.meta[VALUE].dtype != dtype or dtype == torch.bool:
        return None
    if times == 1:
        return rows  # type: ignore[no-any-return]
    sizes = size_arguments(base, writer)
    grouped = writer.call(aten.view.default, rows, [sizes[0], times, *sizes[1:]])
    return writer.call(aten.sum.dim_IntList, grouped, [1], dtype=node.meta[VALUE].dtype)  # a sum of small integers would be int64


@rewrite_rule(aten.gather.default, aten.scatter_add.default)
def gather_rows_to_index(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """gather(x, 0, expand(i)) -> x[i],  scatter_add(x, 0, expand(i), y) -> index_add(x, 0, i, y)

    Applies if the index is a vector expanded to all columns. gather rejects negative indices, so an assertion is added
    unless none can occur.
    """
    arguments, width = bound_arguments(node), shape_of_node(node)[1:]
    index = _match_column_vector(arguments["index"], width) if arguments["dim"] == 0 else None
    if index is None or shape_of_node(arguments["self"])[1:] != width:
        return None
    if node.target is aten.gather.default:
        if not is_never_negative(index):
            all_nonnegative = writer.call(aten.all.default, writer.call(aten.ge.Scalar, index, 0))
            writer.call(aten._assert_async.msg, all_nonnegative, "index out of bounds for dimension 0")
        return writer.call(aten.index.Tensor, arguments["self"], [index])
    if shape_of_node(arguments["src"]) != (*shape_of_node(index), *width):
        return None
    return writer.call(aten.index_add.default, arguments["self"], 0, index, arguments["src"])


@rewrite_rule(aten.index.Tensor)
def index_by_list_to_slices(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[:, [0, 1, -1]] -> cat([x[:, 0:2], x[:, -1:]], 1)

    Applies to a short constant index whose rows exist.
    """
    runs_of_index = _match_constant_runs(node)
    if runs_of_index is None:
        return None
    dim, runs = runs_of_index
    parts = [writer.call(aten.slice.Tensor, node_argument(node), dim, start, end) for start, end, _ in runs]
    return writer.call(aten.cat.default, parts, dim) if len(parts) > 1 else writer.call(aten.clone.default, parts[0])


@rewrite_rule(aten.index_put.default)
def index_put_by_list_to_slice_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_put(zeros, [None, [0, 1, -1]], d, accumulate) -> slice_backward(d[:, :2], 0, 2) + slice_backward(d[:, 2:], -1)"""
    arguments, runs_of_index = bound_arguments(node), _match_constant_runs(node)
    base, rows = arguments["self"], arguments["values"]
    if (
        runs_of_index is None
        or not is_zero(base)
        or not arguments["accumulate"]
        or rows.meta[VALUE].dtype != base.meta[VALUE].dtype
    ):
        return None
    dim, runs = runs_of_index
    shape = shape_of_node(base)
    if shape_of_node(rows) != (*shape[:dim], sum(count for *_, count in runs), *shape[dim + 1 :]):
        return None
    base_value, total, begin = base.meta[VALUE], None, 0
    rows = writer.call(
        aten.add.Tensor, rows, writer.call(aten.full.default, [], 0, dtype=base_value.dtype, device=base_value.device)
    )
    for start, end, count in runs:  # 0 + -0 is 0
        part = writer.call(aten.slice.Tensor, rows, dim, begin, begin + count) if len(runs) > 1 else rows
        padded = writer.call(aten.slice_backward.default, part, size_arguments(base, writer), dim, start, end, 1)
        total, begin = padded if total is None else writer.call(aten.add.Tensor, total, padded), begin + count
    return total


def _match_constant_runs(node: fx.Node) -> tuple[int, list[tuple[int, int, int]]] | None:
    """Return the dimension that a short constant list indexes, and its runs: (first row, end row, number of rows); else None."""
    arguments = bound_arguments(node)
    index_tensors = [(dim, index) for dim, index in enumerate(arguments["indices"]) if is_tensor(index)]
    constant = index_tensors[0][1].meta.get(CONSTANT) if len(index_tensors) == 1 else None
    if constant is None or constant.dtype not in INDEX_DTYPES or constant.dim() != 1 or not 0 < len(constant) <= MAX_LISTED_ROWS:
        return None
    (dim, _), numbers = index_tensors[0], constant.tolist()
    size = shape_of_node(arguments["self"])[dim]
    if isinstance(size, int):
        if not all(-size <= number < size for number in numbers):
            return None
        numbers = [number % size for number in numbers]
    elif numbers not in ([0], [-1]) or not is_at_least(size, 1):
        return None
    runs: list[tuple[int, int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1, runs[-1][2] + 1
        else:
            runs.append((number, number + 1, 1))
    return dim, [(start, sys.maxsize if end == 0 else end, count) for start, end, count in runs]


def is_never_negative(index: fx.Node) -> bool:
    """Return whether an index vector has no negative element: it is from a sort or a range, or a quotient of one."""
    while index.meta[VALUE].dtype in INDEX_DTYPES and (index.target in (*COPIES, *VIEWS) or _is_floor_divided(index)):
        index = node_argument(index)
    if index.target is operator.getitem:
        return bool(index.args[1] == 1) and node_argument(index).target in SORTS
    return index.target in ORDERS or is_arange(index)


def _is_floor_divided(node: fx.Node) -> bool:
    """Return whether a node divides by a positive integer, rounding down."""
    return node.target is aten.floor_divide.default and isinstance(node.args[1], int) and node.args[1] > 0


def _match_column_vector(index: fx.Node, width: tuple[Size, ...]) -> fx.Node | None:
    """Return the vector [s] that an index [s *width] repeats for all columns."""
    if len(shape_of_node(index)) == 1:
        return index
    if index.target is not aten.expand.default or shape_of_node(index)[1:] != width:
        return None
    column = node_argument(index)
    if column.target not in (aten.unsqueeze.default, *VIEWS):
        return None
    vector = node_argument(column)
    is_column = len(shape_of_node(vector)) == 1 and shape_of_node(column) == (shape_of_node(vector)[0], *(1 for _ in width))
    return vector if is_column and shape_of_node(index)[0] == shape_of_node(vector)[0] else None


def find_row_index(node: fx.Node) -> fx.Node | None:
    """Return the vector that indexes the first dimension in a look-up or a write; None if another dimension is indexed."""
    arguments = bound_arguments(node)
    if "indices" in arguments:
        first, *other_indices = arguments["indices"]
    else:
        first, other_indices = arguments["index"] if arguments["dim"] == 0 else None, []
    is_single_vector = is_tensor(first) and not any(is_tensor(item) for item in other_indices)
    return first if is_single_vector and len(shape_of_node(first)) == 1 else None


def find_repeats(index: fx.Node, rows: Size) -> int | None:
    """Return k if an index vector is 0, 1, ... `rows` - 1, with each number k times in a row."""
    if index.meta[VALUE].dtype not in INDEX_DTYPES:  # bool and uint8 indices are masks
        return None
    while index.target in COPIES and _holds_row_indices(index, rows):
        index = node_argument(index)
    times: Any = None
    if is_arange(index):
        times = 1
    elif index.target is aten.floor_divide.default and is_arange(index.args[0]) and _holds_row_indices(index, rows):
        times = index.args[1]
    elif index.target in VIEWS:
        times = _find_matrix_repeats(node_argument(index))
    is_valid = isinstance(times, int) and times > 0 and product((rows, times)) == shape_of_node(index)[0]
    return times if is_valid else None


def _holds_row_indices(node: fx.Node, rows: Size) -> bool:
    """Return whether the dtypes of an index vector and of its operand hold all row indices exactly."""
    types = [node.meta[VALUE].dtype, node_argument(node).meta[VALUE].dtype]
    return all(not dtype.is_floating_point and is_exact_in(dtype, 0, max_size(rows)) for dtype in types)


def _find_matrix_repeats(node: fx.Node) -> Size | None:
    """Return k if a matrix [n k] repeats the vector 0, 1, ... n - 1 along its columns."""
    node = node_argument(node) if node.target is aten.clone.default else node
    if node.target is not aten.expand.default or len(shape_of_node(node)) != 2:
        return None
    column = node_argument(node)
    is_column = column.target in (aten.unsqueeze.default, *VIEWS) and is_arange(column.args[0])
    rows, times = shape_of_node(node)
    return times if is_column and shape_of_node(column) == (rows, 1) else None


def is_arange(node: Any) -> bool:
    """Return whether a vector is 0, 1, 2, ..., and its dtype holds all of these exactly."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in ARANGES:
        return False
    arguments = bound_arguments(node)
    from_zero = arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1
    return bool(from_zero and is_exact_in(node.meta[VALUE].dtype, 0, max_size(shape_of_node(node)[0])))
