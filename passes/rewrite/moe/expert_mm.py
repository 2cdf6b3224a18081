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
from streamfx.ir.ranges import LONGEST, is_exact_in
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.kernels.grouped_mm import GROUPED_MM, GROUPED_OUTER
from streamfx.node_meta import VALUE, WHY_WHOLE
from streamfx.passes.ops.constants import fill_of
from streamfx.passes.ops.ranges.casts import RESHAPED, SAME_SHAPES, behind_copies, is_whole
from streamfx.passes.rewrite.moe.sort_elimination import Permutations, Permuted
from streamfx.passes.rewrite.views.iota_index import VIEWS, counts_up

aten = torch.ops.aten
SAME_NUMBERS = SAME_SHAPES | RESHAPED


def product(orders: Permutations, node: fx.Node) -> None:
    """(x, weight, ends): multiply rows by their group's weight, or multiply rows by rows and sum per group."""
    arguments = bound_arguments(node)
    x, weight = node.args[:2]
    others = [value for name, value in arguments.items() if name not in ("input", "self", "mat2", "weight", "offs")]
    ends = arguments.get("offs")
    if ends is None or any(value is not None for value in others):
        return
    rank = len(shape_of_node(x)), len(shape_of_node(weight))  # type: ignore[arg-type]
    writer = orders.writer.before(node)
    _record_fallback(node, "nothing proves that its rows are sorted by group")
    if rank == (2, 3) and (rows := orders.at(x)) is not None:
        group = _group(orders, node, rows.order, ends, shape_of_node(weight)[0])  # type: ignore[arg-type]
        if group is not None and weight not in orders.reordered:
            orders.note(node, rows.order, writer.call(GROUPED_MM, rows.twin, weight, group))
    elif rank == (2, 2) and (rows := orders.at(x, 1)) is not None and (other := orders.at(weight)) is not None:
        group = _group(orders, node, rows.order, ends, shape_of_node(ends)[0])
        if group is not None and other.order is rows.order:
            across = writer.call(aten.transpose.int, rows.twin, 0, 1)
            orders.note(node, rows.order, _sums_of_products(across, other.twin, group, node, writer), None)


def product_backward(orders: Permutations, node: fx.Node) -> None:
    """(x, weight, ends, gradient): compute the gradients of x and of weight."""
    x, weight, ends, gradient = node.args
    rows, cotangent = orders.at(x), orders.at(gradient)
    _record_fallback(node, "nothing proves that its rows are sorted by group")
    if rows is None or cotangent is None or rows.order is not cotangent.order or weight in orders.reordered:
        return
    count = shape_of_node(weight)[0]  # type: ignore[arg-type]
    group = _group(orders, node, rows.order, ends, count)
    if group is None:
        return
    for part in node.users:
        assert part.target is operator.getitem
        writer = orders.writer.before(part)
        if int_argument(part, 1) == 0:
            transposed = writer.call(aten.transpose.int, weight, 1, 2)
            orders.note(part, rows.order, writer.call(GROUPED_MM, cotangent.twin, transposed, group))
        else:
            orders.note(part, rows.order, _sums_of_products(rows.twin, cotangent.twin, group, part, writer), None)
    orders.reordered[node] = Permuted(rows.order, rows.twin, ())


def _sums_of_products(x: fx.Node, y: fx.Node, group: fx.Node, like: fx.Node, writer: GraphWriter) -> fx.Node:
    """Sum the outer products of each group's rows, with the strides of the traced result.

    Autograd copies a gradient whose strides differ from its weight's.
    """
    wanted = like.meta[VALUE]
    if wanted.stride()[1:] == (1, wanted.shape[1]):
        transposed = writer.call(GROUPED_OUTER, y, x, group, wanted.shape[0])
        return writer.call(aten.transpose.int, transposed, 1, 2)
    return writer.call(GROUPED_OUTER, x, y, group, wanted.shape[0])


def _group(orders: Permutations, node: fx.Node, order: fx.Node, ends: Any, count: Any) -> fx.Node | None:
    """Return the group of each row, if the permutation sorts by it and `ends` are the ends of `count` groups."""
    keys = orders.sorted_by[order]
    if count == 1 and _counts_all(ends, keys):
        writer, own = orders.writer.before(node), keys.meta[VALUE]
        return writer.call(aten.full.default, size_arguments(keys, writer), 0, dtype=own.dtype, device=own.device)
    if not is_whole(keys, orders.values):
        _record_fallback(node, "its rows are sorted by numbers that may be fractions as far as the graph tells")
        return None
    counted = _counted(orders, ends, count, keys)
    if counted is None or _same_numbers(orders, counted) is not _same_numbers(orders, keys):
        _record_fallback(node, "nothing proves that its groups end where the numbers end by which its rows are sorted")
        return None
    if orders.values.of(keys).low < 0:
        _record_fallback(node, "the numbers of its groups may be negative as far as the graph tells, and such rows have no group")
        return None
    return keys


def _record_fallback(node: fx.Node, reason: str) -> None:
    node.meta[WHY_WHOLE] = f"{node.target}: {reason}"


def _counts_all(ends: fx.Node, keys: fx.Node) -> bool:
    """Whether the single group ends at the last row: a histogram with one bin and automatic bounds counts every value."""
    found = _cumsum_operand(ends, shape_of_node(keys))
    if found is None or found.target is not aten.histc.default:
        return False
    arguments = bound_arguments(found)
    is_complete = sizes.product(shape_of_node(node_argument(found))) == sizes.product(shape_of_node(keys))
    return arguments["bins"] == 1 and arguments["min"] == arguments["max"] and is_complete


def _cumsum_operand(ends: fx.Node, counted: tuple[Size, ...]) -> fx.Node | None:
    """Return the counts whose cumulative sum `ends` is, if all dtypes on the way represent every count exactly."""
    types = [ends.meta[VALUE].dtype]

    def before_casts(node: fx.Node) -> fx.Node:
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
    """Whether a dtype represents all counts exactly. If the size is dynamic, eager's own float32 counts are assumed to be
    exact.
    """
    most = sizes.product(counted)
    if isinstance(most, int):
        return is_exact_in(dtype, 0, most)
    return is_exact_in(dtype, 0, 2**24 if dtype.is_floating_point else LONGEST)


def _counted(orders: Permutations, ends: fx.Node, count: Any, keys: fx.Node) -> fx.Node | None:
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


def _histogram(orders: Permutations, counts: fx.Node, count: Any) -> fx.Node | None:
    """Return the numbers of a histogram if each bin holds one integer.

    That is: `count` bins over [0, count - 1], or over [0, count] if no number equals `count`.
    """
    arguments = bound_arguments(counts)
    numbers, bins, low, high = node_argument(counts), arguments["bins"], arguments["min"], arguments["max"]
    fits = bins == count and low == 0 and high in (count - 1, count) and high > 0
    none_beyond = high == count - 1 or orders.values.of(numbers).high < count
    return numbers if fits and none_beyond else None


def _ones_added(orders: Permutations, counts: fx.Node, count: Any) -> fx.Node | None:
    """zeros.index_add(0, numbers, ones)"""
    arguments = bound_arguments(counts)
    base, ones = arguments["self"], arguments["source"]
    fits = arguments["alpha"] == 1 and shape_of_node(counts) == (count,) and fill_of(base) == 0 and fill_of(ones) == 1
    return arguments["index"] if fits else None


def _equals_summed(orders: Permutations, counts: fx.Node, count: Any) -> fx.Node | None:
    """(numbers[:, None] == [0 1 2 ...]).sum(0)"""
    source, dims = node_argument(counts), bound_arguments(counts)["dim"]
    while source.target is aten._to_copy.default:  # casts of bool: any dtype represents it exactly
        source = node_argument(source)
    if source.target is not aten.eq.Tensor or list(dims) != [0] or len(shape_of_node(source)) != 2:
        return None
    numbers, candidates = source.args
    if numbers.meta[VALUE].dtype != candidates.meta[VALUE].dtype:  # type: ignore[union-attr]
        return None
    column, row = node_argument(source), candidates
    is_table = counts_up(row) and shape_of_node(row) == (count,)  # type: ignore[arg-type]
    is_column = column.target in (aten.unsqueeze.default, *VIEWS) and shape_of_node(column)[1] == 1
    return numbers if is_table and is_column else None  # type: ignore[return-value]


def _same_numbers(orders: Permutations, node: fx.Node) -> fx.Node:
    """Return the value before views and casts that keep its numbers."""
    return behind_copies(node, orders.values, SAME_NUMBERS)


COUNTERS: dict[Any, Any] = {
    aten.histc.default: _histogram,
    aten.index_add.default: _ones_added,
    aten.sum.dim_IntList: _equals_summed,
}
PRODUCTS = {
    "aten::_grouped_mm": product,
    "transformers::grouped_mm_fallback": product,
    "transformers::grouped_mm_fallback_backward": product_backward,
}
