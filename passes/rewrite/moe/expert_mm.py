"""Replace grouped matrix products over rows sorted by group by the same products over the rows in their original order.

    order = sort(group),  ends = cumsum(number of rows per group)
    grouped_mm(x[order], weight, ends)         ->   streamfx::grouped_mm(x, weight, group)[order]
    grouped_mm(x[order].T, y[order], ends)     ->   streamfx::grouped_outer(x, y, group)

`group` has each row's group index (its expert), `order` the permutation that sorts them, and `ends` the end of each group
among the sorted rows: three groups of 2, 0 and 3 rows end at [2, 2, 5]. The handlers here extend `sort_elimination.py`.
They record in `Permutations` that a value is permuted rows, or *restored* (it does not depend on the permutation), with its
*twin*: the value that is computed from the rows in their original order.

Two facts must be proven. `ends` are the ends of the groups: the operators that count the rows show this. No group index is
negative, because such rows would be sorted to the front but not counted: the range of the indices shows this, for example
if they are indices of the largest scores.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.dialect.products import GROUPED_MM, GROUPED_OUTER
from streamfx.ir import sizes
from streamfx.ir.joint import bound_arguments, int_argument, shape_of_node
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.ranges import MAX_ROWS, is_exact_in
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import FALLBACK_REASON, VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.ops.ranges.casts import EXACT_COPIES, holds_integers, source_of_exact_copies
from streamfx.passes.rewrite.moe.sort_elimination import Permutations, Permuted
from streamfx.passes.rewrite.pattern import REST, Captures, Through, Where, either, op
from streamfx.passes.rewrite.views.iota_index import is_arange

aten = torch.ops.aten
# (integers[:, None] == arange(num_groups)), which casts of bool represent in any dtype
IS_GROUP = op(
    aten.eq.Tensor, op(of_kind(Kind.UNSQUEEZE, Kind.RESHAPE), REST, name="counted"), Where(is_arange, "groups"), name="is_group"
)
COUNTS = either(
    op(aten.histc.default, "counted", "num_groups", 0, "high"),
    op(
        aten.index_add.default,
        Where(lambda base: find_fill(base) == 0, ...),
        0,
        "counted",
        Where(lambda x: find_fill(x) == 1, ...),
    ),
    op(aten.sum.dim_IntList, Through({aten._to_copy.default}, IS_GROUP), [0], dtype=...),
)
NOT_SORTED = "streamfx cannot prove that its rows are sorted by group"


def _handle_grouped_mm(orders: Permutations, node: fx.Node) -> None:
    """Record the twin of a grouped product of two matrices and `ends` (`offs`), if its rows are proven to be sorted.

    rows [n d], weights [g d e]: each row times the weight of its group. The twin is a product of unsorted rows.
    rows [d n], rows [n e]: for each group, the sum of its rows' outer products, [g d e]. It does not depend on the order.
    Otherwise the node keeps a reason for its fallback (`FALLBACK_REASON`).
    """
    arguments = bound_arguments(node)
    left, right = node.args[:2]
    unsupported_options = [value for name, value in arguments.items() if name not in ("input", "self", "mat2", "weight", "offs")]
    ends = arguments.get("offs")
    if ends is None or any(value is not None for value in unsupported_options):
        return
    ranks = len(shape_of_node(left)), len(shape_of_node(right))  # type: ignore[arg-type]
    writer = orders.writer.move_before(node)
    _record_fallback(node, NOT_SORTED)
    if ranks == (2, 3) and (rows := orders.permuted_along(left)) is not None:
        group = _prove_groups(orders, node, rows.order, ends, shape_of_node(right)[0])  # type: ignore[arg-type]
        if group is not None and right not in orders.permuted:
            orders.record(node, rows.order, writer.call(GROUPED_MM, rows.twin, right, group))
    elif (
        ranks == (2, 2)
        and (rows := orders.permuted_along(left, 1)) is not None
        and (other_rows := orders.permuted_along(right)) is not None
    ):
        group = _prove_groups(orders, node, rows.order, ends, shape_of_node(ends)[0])
        if group is not None and other_rows.order is rows.order:
            transposed = writer.call(aten.transpose.int, rows.twin, 0, 1)
            orders.record(node, rows.order, _emit_grouped_outer(transposed, other_rows.twin, group, node, writer), dim=None)


def _handle_grouped_mm_backward(orders: Permutations, node: fx.Node) -> None:
    """Record the twins of the gradients of a grouped product (x, weight, ends), if its rows are proven to be sorted.

    The gradient of x (result 0) is permuted rows: each row of the incoming gradient times the transposed weight of its
    group. The gradient of the weight (result 1) is a sum over the rows of each group, which does not depend on the order.
    """
    x, weight, ends, gradient = node.args
    rows, cotangent = orders.permuted_along(x), orders.permuted_along(gradient)
    _record_fallback(node, NOT_SORTED)
    if rows is None or cotangent is None or rows.order is not cotangent.order or weight in orders.permuted:
        return
    num_groups = shape_of_node(weight)[0]  # type: ignore[arg-type]
    group = _prove_groups(orders, node, rows.order, ends, num_groups)
    if group is None:
        return
    for getitem in node.users:
        assert getitem.target is operator.getitem
        writer = orders.writer.move_before(getitem)
        if int_argument(getitem, 1) == 0:
            transposed = writer.call(aten.transpose.int, weight, 1, 2)
            orders.record(getitem, rows.order, writer.call(GROUPED_MM, cotangent.twin, transposed, group))
        else:
            orders.record(getitem, rows.order, _emit_grouped_outer(rows.twin, cotangent.twin, group, getitem, writer), dim=None)
    orders.permuted[node] = Permuted(rows.order, rows.twin, ())  # it depends on the order; nothing reads this twin


def _emit_grouped_outer(x: fx.Node, y: fx.Node, group: fx.Node, like: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit, for each group, the sum of the outer products of its rows of x [n d] and y [n e]: a tensor [g d e].

    It gets the strides of the traced result `like`. With other strides, autograd would copy the gradient.
    """
    traced = like.meta[VALUE]
    if traced.stride()[1:] == (1, traced.shape[1]):
        transposed = writer.call(GROUPED_OUTER, y, x, group, traced.shape[0])
        return writer.call(aten.transpose.int, transposed, 1, 2)
    return writer.call(GROUPED_OUTER, x, y, group, traced.shape[0])


def _prove_groups(orders: Permutations, node: fx.Node, order: fx.Node, ends: Any, num_groups: Any) -> fx.Node | None:
    """Return the group index of each row, in the original order; None, with a reason at `node`, without a proof.

    `order` sorts the rows by keys. They are the group indices if `ends` is proven to count them: ends[i] is the number of
    keys in [0, i], and no key is negative.
    """
    keys = orders.sort_keys[order]
    if num_groups == 1 and _is_single_full_group(ends, keys):  # all rows are in group 0, for any keys
        writer, keys_value = orders.writer.move_before(node), keys.meta[VALUE]
        return writer.call(aten.full.default, size_arguments(keys, writer), 0, dtype=keys_value.dtype, device=keys_value.device)
    if not holds_integers(keys, orders.values):
        _record_fallback(node, "its rows are sorted by keys that may not be integers")
        return None
    counted = _match_counts(orders, ends, num_groups, keys)
    if counted is None or _before_exact_copies(orders, counted) is not _before_exact_copies(orders, keys):
        _record_fallback(node, "streamfx cannot prove that its group ends count the keys by which its rows are sorted")
        return None
    if orders.values.of(keys).low < 0:
        _record_fallback(node, "its group indices may be negative, and such rows belong to no group")
        return None
    return keys


def _record_fallback(node: fx.Node, reason: str) -> None:
    """Record the reason why an operator falls back; it has no effect if the operator is replaced."""
    node.meta[FALLBACK_REASON] = f"{node.target}: {reason}"


def _is_single_full_group(ends: fx.Node, keys: fx.Node) -> bool:
    """Return whether `ends` has one entry, the number of rows: the cumulative sum of a histogram that counts every key.

    A histogram counts every key if it has one bin, and equal bounds: `histc` then takes its bounds from the data.
    """
    match = op(aten.histc.default, "counted", 1, "bound", "bound").match(_cumsum_operand(ends, shape_of_node(keys)))
    return match is not None and sizes.product(shape_of_node(match["counted"])) == sizes.product(shape_of_node(keys))


def _cumsum_operand(ends: fx.Node, counted_shape: tuple[Size, ...]) -> fx.Node | None:
    """Return x if `ends` is cumsum(x), up to casts; else None.

    `counted_shape` is the shape of the values that x counts. All dtypes in between must represent each such count exactly.
    """

    def holds_counts(value: fx.Node) -> bool:
        """Return whether the dtype of a value represents all counts."""
        return _holds_counts(value.meta[VALUE].dtype, counted_shape)

    def casts(pattern: Any) -> Through:
        """Return a pattern of casts of a value, all in such dtypes."""
        return Through({aten._to_copy.default}, Where(holds_counts, pattern), keeps=holds_counts)

    match = casts(op(aten.cumsum.default, casts("counts"), 0, dtype=...)).match(ends)
    return match["counts"] if match is not None and len(shape_of_node(ends)) == 1 else None


def _holds_counts(dtype: torch.dtype, counted_shape: tuple[Size, ...]) -> bool:
    """Return whether a dtype represents all counts of values with this shape exactly.

    If the shape is dynamic, float32 counts are assumed to be exact, as in eager.
    """
    largest_count = sizes.product(counted_shape)
    if isinstance(largest_count, int):
        return is_exact_in(dtype, 0, largest_count)
    return is_exact_in(dtype, 0, 2**24 if dtype.is_floating_point else MAX_ROWS)


def _match_counts(orders: Permutations, ends: fx.Node, num_groups: Any, keys: fx.Node) -> fx.Node | None:
    """Return the integers that `ends` counts: ends[i] is proven to be the number of these integers that are at most i.

    `ends` has `num_groups` entries. Return None without a proof, or if there are not as many integers as `keys`.
    """
    counts = _cumsum_operand(ends, shape_of_node(keys))
    if counts in orders.restored:
        counts = orders.restored[counts].twin
    match = COUNTS.match(counts, {"num_groups": num_groups})
    if match is None or shape_of_node(counts) != (num_groups,):  # type: ignore[arg-type]
        return None
    counted: fx.Node = match["counted"]
    if "high" in match and not _has_integer_bins(orders, match):
        return None
    if "groups" in match and (shape_of_node(counted)[1] != 1 or match["groups"].meta[VALUE].dtype != counted.meta[VALUE].dtype):
        return None
    return counted if sizes.product(shape_of_node(counted)) == sizes.product(shape_of_node(keys)) else None


def _has_integer_bins(orders: Permutations, histogram: Captures) -> bool:
    """Return whether bin i of a histogram counts the integers equal to i, for i < `num_groups`.

    The bins start at 0, and must end at num_groups - 1, or at `num_groups` if no integer equals `num_groups`.
    """
    counted, num_groups, high = (histogram[name] for name in ("counted", "num_groups", "high"))
    is_below_upper_bound = high == num_groups - 1 or orders.values.of(counted).high < num_groups
    return high in (num_groups - 1, num_groups) and high > 0 and is_below_upper_bound


def _before_exact_copies(orders: Permutations, node: fx.Node) -> fx.Node:
    """Return the value before views that keep its elements and their order, and casts that do not round them."""
    return source_of_exact_copies(node, orders.values, EXACT_COPIES)


GROUPED_MM_HANDLERS = {
    "aten::_grouped_mm": _handle_grouped_mm,
    "transformers::grouped_mm_fallback": _handle_grouped_mm,
    "transformers::grouped_mm_fallback_backward": _handle_grouped_mm_backward,
}
