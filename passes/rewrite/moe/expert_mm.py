"""Replace grouped matrix products over rows sorted by group by the same products over the rows in their original order.

    order = sort(group),  ends = cumsum(number of rows per group)
    grouped_mm(x[order], weight, ends)         ->   streamfx::grouped_mm(x, weight, group)[order]
    grouped_mm(x[order].T, y[order], ends)     ->   streamfx::grouped_outer(x, y, group)

That `ends` are the group ends follows from how the rows are counted. No group index may be negative: such rows would be
sorted to the front but not counted. This follows from the values' range, for example if they are indices of the largest
scores.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir import sizes
from streamfx.ir.joint import bound_arguments, int_argument, node_argument, shape_of_node
from streamfx.ir.ranges import MAX_ROWS, is_exact_in
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.kernels.grouped_mm import GROUPED_MM, GROUPED_OUTER
from streamfx.node_meta import VALUE, WHY_WHOLE
from streamfx.passes.ops.constants import fill_of
from streamfx.passes.ops.ranges.casts import RESHAPED, SAME_SHAPES, holds_integers, source_of_exact_copies
from streamfx.passes.rewrite.moe.sort_elimination import Permutations, Permuted
from streamfx.passes.rewrite.views.iota_index import VIEWS, counts_up

aten = torch.ops.aten
SAME_NUMBERS = SAME_SHAPES | RESHAPED


def grouped_product(orders: Permutations, node: fx.Node) -> None:
    """Record the twin of a product (x, weight, ends): rows times the weight of their group, or rows times rows per group."""
    arguments = bound_arguments(node)
    x, weight = node.args[:2]
    unsupported_options = [value for name, value in arguments.items() if name not in ("input", "self", "mat2", "weight", "offs")]
    ends = arguments.get("offs")
    if ends is None or any(value is not None for value in unsupported_options):
        return
    rank = len(shape_of_node(x)), len(shape_of_node(weight))  # type: ignore[arg-type]
    writer = orders.writer.before(node)
    _record_fallback(node, "nothing proves that its rows are sorted by group")
    if rank == (2, 3) and (rows := orders.permuted_along(x)) is not None:
        group = _proven_group(orders, node, rows.order, ends, shape_of_node(weight)[0])  # type: ignore[arg-type]
        if group is not None and weight not in orders.permuted:
            orders.record(node, rows.order, writer.call(GROUPED_MM, rows.twin, weight, group))
    elif (
        rank == (2, 2)
        and (rows := orders.permuted_along(x, 1)) is not None
        and (other_rows := orders.permuted_along(weight)) is not None
    ):
        group = _proven_group(orders, node, rows.order, ends, shape_of_node(ends)[0])
        if group is not None and other_rows.order is rows.order:
            across = writer.call(aten.transpose.int, rows.twin, 0, 1)
            orders.record(node, rows.order, _emit_grouped_outer(across, other_rows.twin, group, node, writer), dim=None)


def grouped_product_backward(orders: Permutations, node: fx.Node) -> None:
    """Record the twins of the gradients of (x, weight, ends, gradient) with respect to x and weight."""
    x, weight, ends, gradient = node.args
    rows, cotangent = orders.permuted_along(x), orders.permuted_along(gradient)
    _record_fallback(node, "nothing proves that its rows are sorted by group")
    if rows is None or cotangent is None or rows.order is not cotangent.order or weight in orders.permuted:
        return
    count = shape_of_node(weight)[0]  # type: ignore[arg-type]
    group = _proven_group(orders, node, rows.order, ends, count)
    if group is None:
        return
    for getitem in node.users:
        assert getitem.target is operator.getitem
        writer = orders.writer.before(getitem)
        if int_argument(getitem, 1) == 0:
            transposed = writer.call(aten.transpose.int, weight, 1, 2)
            orders.record(getitem, rows.order, writer.call(GROUPED_MM, cotangent.twin, transposed, group))
        else:
            orders.record(getitem, rows.order, _emit_grouped_outer(rows.twin, cotangent.twin, group, getitem, writer), dim=None)
    orders.permuted[node] = Permuted(rows.order, rows.twin, ())


def _emit_grouped_outer(x: fx.Node, y: fx.Node, group: fx.Node, like: fx.Node, writer: GraphWriter) -> fx.Node:
    """Sum the outer products of each group's rows, with the strides of the traced result.

    Autograd copies a gradient whose strides differ from its weight's.
    """
    traced = like.meta[VALUE]
    if traced.stride()[1:] == (1, traced.shape[1]):
        transposed = writer.call(GROUPED_OUTER, y, x, group, traced.shape[0])
        return writer.call(aten.transpose.int, transposed, 1, 2)
    return writer.call(GROUPED_OUTER, x, y, group, traced.shape[0])


def _proven_group(orders: Permutations, node: fx.Node, order: fx.Node, ends: Any, count: Any) -> fx.Node | None:
    """Return the group of each row, if the permutation sorts by it and `ends` are the ends of `count` groups."""
    keys = orders.sort_keys[order]
    if count == 1 and _is_single_full_group(ends, keys):
        writer, keys_value = orders.writer.before(node), keys.meta[VALUE]
        return writer.call(aten.full.default, size_arguments(keys, writer), 0, dtype=keys_value.dtype, device=keys_value.device)
    if not holds_integers(keys, orders.values):
        _record_fallback(node, "its rows are sorted by numbers that may be fractions as far as the graph tells")
        return None
    numbers = _counted_numbers(orders, ends, count, keys)
    if numbers is None or _before_exact_copies(orders, numbers) is not _before_exact_copies(orders, keys):
        _record_fallback(node, "nothing proves that its groups end where the numbers end by which its rows are sorted")
        return None
    if orders.values.of(keys).low < 0:
        _record_fallback(node, "the numbers of its groups may be negative as far as the graph tells, and such rows have no group")
        return None
    return keys


def _record_fallback(node: fx.Node, reason: str) -> None:
    """Record the reason why an operator falls back; it has no effect if the operator is replaced."""
    node.meta[WHY_WHOLE] = f"{node.target}: {reason}"


def _is_single_full_group(ends: fx.Node, keys: fx.Node) -> bool:
    """Return whether the single group ends at the last row: a histogram with one bin and automatic bounds counts every value."""
    counts = _cumsum_operand(ends, shape_of_node(keys))
    if counts is None or counts.target is not aten.histc.default:
        return False
    arguments = bound_arguments(counts)
    counts_all_rows = sizes.product(shape_of_node(node_argument(counts))) == sizes.product(shape_of_node(keys))
    return arguments["bins"] == 1 and arguments["min"] == arguments["max"] and counts_all_rows


def _cumsum_operand(ends: fx.Node, counted: tuple[Size, ...]) -> fx.Node | None:
    """Return the counts whose cumulative sum `ends` is, if all dtypes on the way represent every count exactly."""
    types = [ends.meta[VALUE].dtype]

    def before_casts(node: fx.Node) -> fx.Node:
        """Return the value before casts, and add the dtypes on the way to `types`."""
        while node.target is aten._to_copy.default:
            node = node_argument(node)
            types.append(node.meta[VALUE].dtype)
        return node

    total = before_casts(ends)
    if total.target is not aten.cumsum.default or len(shape_of_node(total)) != 1:
        return None
    types.append(node_argument(total).meta[VALUE].dtype)
    counts = before_casts(node_argument(total))
    return counts if all(_holds_counts(dtype, counted) for dtype in types) else None


def _holds_counts(dtype: torch.dtype, counted: tuple[Size, ...]) -> bool:
    """Return whether a dtype represents all counts exactly. If the size is dynamic, eager's own float32 counts are assumed to be
    exact.
    """
    largest_count = sizes.product(counted)
    if isinstance(largest_count, int):
        return is_exact_in(dtype, 0, largest_count)
    return is_exact_in(dtype, 0, 2**24 if dtype.is_floating_point else MAX_ROWS)


def _counted_numbers(orders: Permutations, ends: fx.Node, count: Any, keys: fx.Node) -> fx.Node | None:
    """Return the numbers that `ends` counts: entry i is how many of them are at most i, for i < `count`."""
    counts = _cumsum_operand(ends, shape_of_node(keys))
    if counts is None:
        return None
    if counts in orders.restored:
        counts = orders.restored[counts].twin
    counter = COUNTERS.get(counts.target)
    numbers = None if counter is None else counter(orders, counts, count)
    if numbers is None or sizes.product(shape_of_node(numbers)) != sizes.product(shape_of_node(keys)):
        return None
    return numbers  # type: ignore[no-any-return]


def _match_histogram(orders: Permutations, counts: fx.Node, count: Any) -> fx.Node | None:
    """Return the numbers of a histogram if each bin holds one integer.

    That is: `count` bins over [0, count - 1], or over [0, count] if no number equals `count`.
    """
    arguments = bound_arguments(counts)
    numbers, bins, low, high = node_argument(counts), arguments["bins"], arguments["min"], arguments["max"]
    has_integer_bins = bins == count and low == 0 and high in (count - 1, count) and high > 0
    no_number_above = high == count - 1 or orders.values.of(numbers).high < count
    return numbers if has_integer_bins and no_number_above else None


def _match_index_add(orders: Permutations, counts: fx.Node, count: Any) -> fx.Node | None:
    """Return the numbers that zeros.index_add(0, numbers, ones) counts, or None."""
    arguments = bound_arguments(counts)
    base, ones = arguments["self"], arguments["source"]
    adds_ones_to_zeros = (
        arguments["alpha"] == 1 and shape_of_node(counts) == (count,) and fill_of(base) == 0 and fill_of(ones) == 1
    )
    return arguments["index"] if adds_ones_to_zeros else None


def _match_equality_sum(orders: Permutations, counts: fx.Node, count: Any) -> fx.Node | None:
    """Return the numbers that (numbers[:, None] == [0 1 2 ...]).sum(0) counts, or None."""
    source, dims = node_argument(counts), bound_arguments(counts)["dim"]
    while source.target is aten._to_copy.default:  # casts of bool: any dtype represents it exactly
        source = node_argument(source)
    if source.target is not aten.eq.Tensor or list(dims) != [0] or len(shape_of_node(source)) != 2:
        return None
    numbers, candidates = source.args
    if numbers.meta[VALUE].dtype != candidates.meta[VALUE].dtype:  # type: ignore[union-attr]
        return None
    column, candidate_row = node_argument(source), candidates
    is_table = counts_up(candidate_row) and shape_of_node(candidate_row) == (count,)  # type: ignore[arg-type]
    is_column = column.target in (aten.unsqueeze.default, *VIEWS) and shape_of_node(column)[1] == 1
    return numbers if is_table and is_column else None  # type: ignore[return-value]


def _before_exact_copies(orders: Permutations, node: fx.Node) -> fx.Node:
    """Return the value before views and casts that keep its numbers."""
    return source_of_exact_copies(node, orders.values, SAME_NUMBERS)


COUNTERS: dict[Any, Any] = {
    aten.histc.default: _match_histogram,
    aten.index_add.default: _match_index_add,
    aten.sum.dim_IntList: _match_equality_sum,
}
PRODUCTS = {
    "aten::_grouped_mm": grouped_product,
    "transformers::grouped_mm_fallback": grouped_product,
    "transformers::grouped_mm_fallback_backward": grouped_product_backward,
}
