"""Simplify indices that count up: an index 0, 1, 2, ... takes each row once, an index 0, 0, 1, 1, ... takes each row twice.

x[0 1 2 ...] -> x                           zeros.index_add(0, [0 1 2 ...], y) -> y
x[0 0 1 1 2 2 ...] -> repeat(x, each 2)     zeros.index_add(0, [0 0 1 1 ...], y) -> y.view(n, 2).sum(1)

"Counts up" means that the index is proven to be one of these, for all rows: `arange`, or `arange` with each number repeated.
Also a short constant index becomes slices.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.ranges import is_exact_in
from streamfx.ir.sizes import Size, is_at_least, product
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import CONSTANT, VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.ranges.transfer import max_size
from streamfx.passes.rewrite.pattern import REST, op, rewrite_rule, tensor

aten = torch.ops.aten
INDEX_DTYPES = (torch.int64, torch.int32)  # dtypes of row indices
EXPANDED_COLUMN = op(aten.expand.default, op(of_kind(Kind.UNSQUEEZE, Kind.RESHAPE), tensor("vector"), REST, name="column"), REST)
MAX_LISTED_ROWS = 16  # largest index that is written as slices


def simplify_arange_index(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Emit and return a replacement for a look-up x[index], or for a sum of rows into zeros, if its index counts up; else None.

    The index is 0, 1, 2, ... over all rows, or each number several times in a row.
    """
    if is_kind(node, Kind.LOOKUP):
        return _emit_lookup(node, writer)
    if node.target is aten.index_add.default or is_kind(node, Kind.PUT):
        return _emit_sum_into(node, writer)
    return None


def _emit_lookup(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Return x for x[0 1 2 ...]; emit x with each row repeated for x[0 0 1 1 ...]; return None for any other index."""
    rows, index = node_argument(node), find_row_index(node)
    repeats = None if index is None else find_repeats(index, shape_of_node(rows)[0])
    if index is None or repeats is None:
        return None
    if repeats == 1:
        return rows
    sizes = size_arguments(rows, writer)
    expanded = writer.call(aten.expand.default, writer.call(aten.unsqueeze.default, rows, 1), [sizes[0], repeats, *sizes[1:]])
    copied = writer.call(aten.clone.default, expanded, memory_format=torch.contiguous_format)
    return writer.call(aten.view.default, copied, [*size_arguments(index, writer), *sizes[1:]])


def _emit_sum_into(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """Return y for zeros.index_add(0, [0 1 ...], y), emit the sums of adjacent rows for [0 0 1 1 ...]; else return None.

    Also for `index_put` with `accumulate`. The sum must have the dtype of the rows.
    """
    arguments = bound_arguments(node)
    base, index = arguments["self"], find_row_index(node)
    rows = arguments["source"] if node.target is aten.index_add.default else arguments["values"]
    accumulates = arguments.get("accumulate", arguments.get("alpha") == 1)
    if index is None or not accumulates or not is_zero(base):
        return None
    repeats = find_repeats(index, shape_of_node(base)[0])
    one_row_per_index = (*shape_of_node(index), *shape_of_node(base)[1:])
    dtype = node.meta[VALUE].dtype
    if repeats is None or shape_of_node(rows) != one_row_per_index or rows.meta[VALUE].dtype != dtype or dtype == torch.bool:
        return None
    if repeats == 1:
        return rows  # type: ignore[no-any-return]
    sizes = size_arguments(base, writer)
    grouped = writer.call(aten.view.default, rows, [sizes[0], repeats, *sizes[1:]])
    return writer.call(aten.sum.dim_IntList, grouped, [1], dtype=node.meta[VALUE].dtype)  # a sum of small integers would be int64


@rewrite_rule(aten.gather.default, aten.scatter_add.default)
def gather_rows_to_index(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """gather(x, 0, expand(i)) -> x[i],  scatter_add(x, 0, expand(i), y) -> index_add(x, 0, i, y)

    Applies if the index is a vector expanded to all columns. gather rejects negative indices, so an assertion is added
    unless none can occur.
    """
    arguments, width = bound_arguments(node), shape_of_node(node)[1:]
    expanded = arguments["index"]
    index = expanded if len(shape_of_node(expanded)) == 1 else index_before_expand(expanded)
    has_one_width = shape_of_node(arguments["self"])[1:] == shape_of_node(expanded)[1:] == width
    if index is None or arguments["dim"] != 0 or len(shape_of_node(index)) != 1 or not has_one_width:
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
    match = _match_constant_runs(node)
    if match is None:
        return None
    dim, runs = match
    parts = [writer.rows(node_argument(node), dim, run.start, run.end) for run in runs]
    return writer.call(aten.cat.default, parts, dim) if len(parts) > 1 else writer.call(aten.clone.default, parts[0])


@rewrite_rule(aten.index_put.default)
def index_put_by_list_to_slice_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_put(zeros, [None, [0, 1, -1]], d, accumulate) -> slice_backward(d[:, :2], 0, 2) + slice_backward(d[:, 2:], -1)"""
    arguments, match = bound_arguments(node), _match_constant_runs(node)
    base, rows = arguments["self"], arguments["values"]
    if match is None or not is_zero(base) or not arguments["accumulate"] or rows.meta[VALUE].dtype != base.meta[VALUE].dtype:
        return None
    dim, runs = match
    shape = shape_of_node(base)
    if shape_of_node(rows) != (*shape[:dim], sum(run.num_rows for run in runs), *shape[dim + 1 :]):
        return None
    base_value = base.meta[VALUE]
    zero = writer.call(aten.full.default, [], 0, dtype=base_value.dtype, device=base_value.device)
    rows = writer.call(aten.add.Tensor, rows, zero)  # 0 + -0 is 0
    result: fx.Node | None = None
    offset = 0  # the number of rows in the runs before
    for run in runs:
        part = writer.rows(rows, dim, offset, offset + run.num_rows) if len(runs) > 1 else rows
        padded = writer.call(aten.slice_backward.default, part, size_arguments(base, writer), dim, run.start, run.end, 1)
        result = padded if result is None else writer.call(aten.add.Tensor, result, padded)
        offset += run.num_rows
    return result


class IndexRun(NamedTuple):
    """Adjacent rows [start, end) in an index; `end` is `sys.maxsize` if the run [-1] ends at the last row."""

    start: int
    end: int
    num_rows: int


def _match_constant_runs(node: fx.Node) -> tuple[int, list[IndexRun]] | None:
    """Return the dimension that a short constant vector indexes, and its runs of adjacent rows: 0 1 5 -> [0, 2) and [5, 6).

    Return None if the index is anything else, or if its rows may not exist. For a dynamic size, it must be [0] or [-1].
    """
    arguments = bound_arguments(node)
    index_tensors = [(dim, index) for dim, index in enumerate(arguments["indices"]) if is_tensor(index)]
    constant = index_tensors[0][1].meta.get(CONSTANT) if len(index_tensors) == 1 else None
    if constant is None or constant.dtype not in INDEX_DTYPES or constant.dim() != 1 or not 0 < len(constant) <= MAX_LISTED_ROWS:
        return None
    dim = index_tensors[0][0]
    numbers = constant.tolist()
    size = shape_of_node(arguments["self"])[dim]
    if isinstance(size, int):
        if not all(-size <= number < size for number in numbers):
            return None
        numbers = [number % size for number in numbers]
    elif numbers not in ([0], [-1]) or not is_at_least(size, 1):
        return None
    runs: list[IndexRun] = []
    for number in numbers:
        if runs and runs[-1].end == number:
            runs[-1] = IndexRun(runs[-1].start, number + 1, runs[-1].num_rows + 1)
        else:
            runs.append(IndexRun(number, number + 1, 1))
    return dim, [run._replace(end=sys.maxsize) if run.end == 0 else run for run in runs]


def is_never_negative(index: fx.Node) -> bool:
    """Return whether an index is proven to have no negative element.

    It is the indices of a sort or topk, `arange`, or one of these divided by a positive integer.
    """
    while index.meta[VALUE].dtype in INDEX_DTYPES and (
        is_kind(index, Kind.CAST, Kind.COPY, Kind.RESHAPE) or _is_floor_divided(index)
    ):
        index = node_argument(index)
    if index.target is operator.getitem:
        return bool(index.args[1] == 1) and is_kind(node_argument(index), Kind.SORT, Kind.TOPK)
    return is_kind(index, Kind.ARGSORT) or is_arange(index)


def _is_floor_divided(node: fx.Node) -> bool:
    """Return whether a node divides by a positive integer constant, rounding down."""
    return node.target is aten.floor_divide.default and isinstance(node.args[1], int) and node.args[1] > 0


def index_before_expand(index: fx.Node) -> fx.Node | None:
    """Return the indices [... n] that an index [... n *width] repeats for all columns.

    Return an index that is not expanded unchanged; None for one that is expanded in any other dimension.
    """
    if index.target is not aten.expand.default:
        return index
    match = EXPANDED_COLUMN.match(index)
    if match is None:
        return None
    shape, column_shape, vector_shape = (shape_of_node(item) for item in (index, match["column"], match["vector"]))
    rank = len(vector_shape)
    is_column = column_shape == (*vector_shape, *(1 for _ in shape[rank:])) and shape[:rank] == vector_shape
    return match["vector"] if is_column and rank < len(shape) else None


def find_row_index(node: fx.Node) -> fx.Node | None:
    """Return the vector that indexes dimension 0 in an `index`, `index_put`, `index_add` or similar operator.

    Return None if it is not a vector, or if another dimension is indexed (as well).
    """
    arguments = bound_arguments(node)
    if "indices" in arguments:
        first, *other_indices = arguments["indices"]
    else:
        first, other_indices = arguments["index"] if arguments["dim"] == 0 else None, []
    is_single_vector = is_tensor(first) and not any(is_tensor(item) for item in other_indices)
    return first if is_single_vector and len(shape_of_node(first)) == 1 else None


def find_repeats(index: fx.Node, rows: Size) -> int | None:
    """Return k if an index vector is proven to be 0, 1, ..., `rows` - 1, with each number k times in a row; else None.

    0 0 1 1 2 2 -> 2 for three rows: arange(6) // 2, or arange(3) repeated by an expansion and a view.
    """
    if index.meta[VALUE].dtype not in INDEX_DTYPES:  # bool and uint8 indices are masks
        return None
    while is_kind(index, Kind.CAST, Kind.COPY) and _holds_row_indices(index, rows):
        index = node_argument(index)
    repeats: Any = None
    if is_arange(index):
        repeats = 1
    elif index.target is aten.floor_divide.default and is_arange(index.args[0]) and _holds_row_indices(index, rows):
        repeats = index.args[1]
    elif is_kind(index, Kind.RESHAPE):
        repeats = _find_matrix_repeats(node_argument(index))
    is_valid = isinstance(repeats, int) and repeats > 0 and product((rows, repeats)) == shape_of_node(index)[0]
    return repeats if is_valid else None


def _holds_row_indices(node: fx.Node, rows: Size) -> bool:
    """Return whether the dtypes of an operator's result and of its operand represent 0, ..., `rows` exactly (as integers)."""
    dtypes = [node.meta[VALUE].dtype, node_argument(node).meta[VALUE].dtype]
    return all(not dtype.is_floating_point and is_exact_in(dtype, 0, max_size(rows)) for dtype in dtypes)


def _find_matrix_repeats(node: fx.Node) -> Size | None:
    """Return k if a matrix [n k] is expand(arange(n)[:, None], [n, k]): row i holds i, k times; else None."""
    node = node_argument(node) if node.target is aten.clone.default else node
    vector = index_before_expand(node)
    return shape_of_node(node)[1] if vector is not node and is_arange(vector) and len(shape_of_node(node)) == 2 else None


def is_arange(node: Any) -> bool:
    """Return whether a vector is 0, 1, 2, ..., and its dtype holds all of these exactly."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not is_kind(node, Kind.ARANGE):
        return False
    arguments = bound_arguments(node)
    from_zero = arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1
    return bool(from_zero and is_exact_in(node.meta[VALUE].dtype, 0, max_size(shape_of_node(node)[0])))
