"""Split attention over concatenated rows and blocks of rows: attend to each, and combine the results.

    attention(q, cat(k, c), cat(v, w), cat(m, n))  ->  the sum of exp(lse_i - total_lse) * out_i of
        attention(q, k, v, m) -> out_1, lse_1
        attention(q, c, w, n) -> out_2, lse_2          total_lse = logaddexp(lse_1, lse_2)

Models with compressed keys do this: k are the keys of rows, c the keys of blocks of rows, and m and n are their masks. The
keys of one part are a *slice* of the concatenation (`ConcatSlices` holds the slices of all values along one such axis).
After the split, rows see the keys that their own mask shows, and blocks have their own axis (`compressed_kv.py`). The
backward computes probabilities from `total_lse`: the gradient of all keys is the concatenation of both gradients. A
concatenation that is only sliced is not computed.

`total_lse` must count only keys that a row sees. Keys that a row does not see must be hidden by minus infinity, or the row
must see a key with an ordinary score: next to a large negative number, the logarithm of a count is lost to rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.axis_table import AxisFactor, Dim
from streamfx.ir.facts import AxisFacts, Facts
from streamfx.ir.joint import JointGraph, bound_arguments, erase_unused, joint_graph, tensor_operands, trained_sources
from streamfx.ir.operator_table import MOVES_ELEMENTS, Kind, of_kind
from streamfx.ir.ranges import MAX_NEXT_TO_COUNT
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.row_maps import row_read
from streamfx.passes.ops.rules.attention import M, N
from streamfx.passes.rewrite.attention.softmax_sink import emit_cast
from streamfx.passes.rewrite.views.concat_propagation import ConcatSlices

aten = torch.ops.aten
OwnKeyTest: TypeAlias = "Callable[[Facts], Callable[[fx.Node], bool]]"
SELECTIONS = MOVES_ELEMENTS | of_kind(Kind.WHERE, Kind.CONCAT, Kind.CAST) | {aten.scatter.value}


@dataclass(frozen=True)
class SplitConcatKV:
    """Split attention over concatenated keys.

    `shows_own_keys` decides whether a mask adds an ordinary number to the score of each row's own key.
    """

    shows_own_keys: OwnKeyTest
    name: ClassVar[str] = "split_concat_kv"

    def apply(self, facts: Facts) -> Facts:
        """Split each attention over concatenated keys, in place, or at first only prepare its mask.

        If masks have to be written as concatenations, only this happens: the pass runs again after the axes of the new
        graph are found. If anything changed, the returned facts have no axes.
        """
        axes, joint = facts.found_axes, facts.joint
        if axes is None or axes.sequence is None or not axes.sequence.blocks:
            return facts
        slices_by_axis = _concatenated_keys(joint, axes)
        attentions = [
            (node, slices)
            for node in joint.nodes
            if node.target in SPLITTERS and (slices := slices_by_axis.get(_key_axis(node, axes)))
        ]
        sliceable = [(node, slices) for node, slices in attentions if _can_be_split(node, slices)]
        if not sliceable:
            return facts
        changes = [_concat_mask(node, slices) for node, slices in sliceable]
        if not any(changes):
            visible_slices = _VisibleSlices(self.shows_own_keys(facts), ValueRanges(trained_sources(joint)), axes)
            changes = [visible_slices.write(node, slices) for node, slices in sliceable]
        if not any(changes):
            return facts
        erase_unused(joint.graph)
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)), found_axes=None)


def _can_be_split(node: fx.Node, slices: ConcatSlices) -> bool:
    """Return whether the keys, values and mask of an attention can be computed slice by slice."""
    arguments = bound_arguments(node)
    sliced_operands = [item for name in ("key", "value", "attn_mask") if (item := arguments[name]) is not None]
    return not arguments["is_causal"] and all(map(slices.can_slice, sliced_operands))


def _concat_mask(node: fx.Node, slices: ConcatSlices) -> bool:
    """Replace an attention's mask that is computed from a concatenation, in place; return whether it changed.

    where(cat([a, b]), 0, -inf) -> cat([where(a, 0, -inf), where(b, 0, -inf)])
    """
    mask = bound_arguments(node)["attn_mask"]
    if mask is None or slices.dim(mask) is None or mask.target is aten.cat.default:
        return False
    mask_slices = slices.slices_of(mask)
    node.update_kwarg("attn_mask", slices.writer.move_before(node).call(aten.cat.default, mask_slices, -1))
    return True


class _VisibleSlices:
    """Decides whether the log-sum-exps of attention over slices of keys are exact, and then splits the attention.

    They are exact if each row sees its own key in some slice, or if no mask hides keys by a large negative number.
    """

    def __init__(self, shows_own_keys: Callable[[fx.Node], bool], values: ValueRanges, axes: AxisFacts) -> None:
        """Store the axes, the value ranges, and a test whether a mask adds an ordinary number to each row's own score."""
        self.shows_own_keys, self.values, self.axes = shows_own_keys, values, axes
        self.bounds = dict[fx.Node, float]()  # by mask: `_bound` of it, computed once

    def write(self, node: fx.Node, slices: ConcatSlices) -> bool:
        """Replace an attention by one attention per slice of keys, in place, and return whether this was possible."""
        mask = bound_arguments(node)["attn_mask"]
        masks = (None,) * len(slices.lengths) if mask is None else slices.slices_of(mask)
        shows_own = [item is None or self._shows_own_keys(item, node) for item in masks]
        if not any(shows_own) and (mask is None or self._bound(mask) > MAX_NEXT_TO_COUNT):
            return False
        SPLITTERS[node.target](node, slices, shows_own)
        return True

    def _shows_own_keys(self, mask: fx.Node, node: fx.Node) -> bool:
        """Return whether a mask is over query rows and their own keys, and adds an ordinary number to each row's own key."""
        queries = self.axes.table.resolve(self.axes.labels[node][M])
        return self.axes.table.resolve(self.axes.shapes[mask][-1]) == queries and self.shows_own_keys(mask)

    def _bound(self, mask: fx.Node) -> float:
        """Return a bound on the magnitude of the finite values of a mask, infinite if it is not known.

        Minus infinity does not count. Weights count as zero: they are assumed to be ordinary numbers.
        """
        if mask not in self.bounds:
            self.bounds[mask] = self._bound_by_operands(mask)
        return self.bounds[mask]

    def _bound_by_operands(self, mask: fx.Node) -> float:
        """Compute `_bound` from a mask's constant, its value range, or the bounds of its operands.

        Of an addition, return the sum of the operands' bounds; of a `where` or a similar selection, the largest.
        """
        if find_fill(mask) == -math.inf:
            return 0
        value_range = self.values.of(mask)
        if value_range.is_counted:
            return 0 if value_range.assumed else float(value_range.magnitude)
        operands = [item for item in tensor_operands(mask) if item.meta[VALUE].is_floating_point()]
        arguments = [*mask.args, *mask.kwargs.values()]
        scalar_magnitudes = [abs(item) for item in arguments if isinstance(item, (int, float)) and item != -math.inf]
        is_sum = mask.target is aten.add.Tensor
        if not operands or not (is_sum or mask.target in SELECTIONS):
            return math.inf
        if is_sum:
            if len(arguments) != 2 or mask.kwargs:  # an operand is multiplied by `alpha`
                return math.inf
            operand_bounds = (self._bound(item) for item in arguments if isinstance(item, fx.Node))  # both, even if equal
            return sum(operand_bounds, sum(scalar_magnitudes))
        return max(*scalar_magnitudes, *map(self._bound, operands), 0)


def _concatenated_keys(joint: JointGraph, axes: AxisFacts) -> dict[AxisFactor | None, ConcatSlices]:
    """Find the axes along which a `cat` joins rows of the sequence and blocks of rows; return the slices of values along each.

    The key is the axis of the concatenation. The lengths of the slices must be static.
    """
    writer = GraphWriter(joint.graph)
    slices_by_axis = dict[AxisFactor | None, ConcatSlices]()
    for node in axes.signatures:
        concat = axes.signatures[node].concat if node.target is aten.cat.default else None
        if concat is not None:
            result_label, concat_axes = concat
            result_dim = axes.table.resolve(axes.labels[node][result_label])
            part_dims = [axes.table.resolve(axes.labels[node][part_label]) for part_label, _ in concat_axes.parts]
            lengths = [axes.table.size_of_dim(dim) for dim in part_dims]
            is_static = all(isinstance(length, int) for length in lengths)
            if len(result_dim) == 1 and _are_rows_and_blocks(part_dims, axes) and is_static:
                axis = result_dim[0]
                slices_by_axis.setdefault(axis, ConcatSlices(axes, writer, axis, lengths))  # type: ignore[arg-type]
    return slices_by_axis


def _are_rows_and_blocks(dims: Sequence[Dim], axes: AxisFacts) -> bool:
    """Return whether some of the dimensions are rows of the sequence, and others are blocks of rows."""
    assert axes.sequence is not None
    sequence_axes = [dim[0] for dim in dims if len(dim) == 1 and dim[0] in axes.sequence.members]
    are_blocks = {axis in axes.sequence.blocks for axis in sequence_axes}
    return are_blocks == {False, True}


def _key_axis(node: fx.Node, axes: AxisFacts) -> AxisFactor | None:
    """Return the axis of an attention's keys; None if the axis is a product of several, or is not known.

    `N` is the axis label of key positions in the signature of attention operators.
    """
    axis_factors = axes.table.resolve(axes.labels[node][N]) if node in axes.signatures else ()
    return axis_factors[0] if len(axis_factors) == 1 else None


# -- writing the replacement


def _split_forward(node: fx.Node, slices: ConcatSlices, shows_own: Sequence[bool]) -> None:
    """Emit one attention per slice of keys, and replace the results by their sum weighted by the share of each slice.

    total_lse = logaddexp over slices of lse_i, out = sum of exp(lse_i - total_lse) * out_i. `shows_own` says for each slice
    whether its mask shows each row its own key; otherwise a row may see no key of the slice.
    """
    query, operands = tensor_operands(node)[0], _operands_by_slice(node, slices)
    dtype, call = query.meta[VALUE].dtype, slices.writer.move_before(node).call
    calls = [call(ATTENTION, query, key, value, **options) for key, value, options in operands]
    outs, lses = ([call(operator.getitem, item, i) for item in calls] for i in range(2))
    for i, (_, _, options) in enumerate(operands):
        if not shows_own[i]:
            lses[i] = _emit_masked_lse(lses[i], options["attn_mask"], slices.writer)  # type: ignore[arg-type]
    total_lse = lses[0]
    for next_lse in lses[1:]:
        total_lse = call(aten.logaddexp.default, total_lse, next_lse)
    lse_dtype = total_lse.meta[VALUE].dtype
    # a row that sees no key has the weight exp(-inf - min) = 0 instead of exp(-inf + inf) = NaN
    finite_lse = call(aten.clamp.default, total_lse, torch.finfo(lse_dtype).min)
    out: fx.Node | None = None
    for slice_out, lse in zip(outs, lses, strict=True):
        weight = call(aten.unsqueeze.default, call(aten.exp.default, call(aten.sub.Tensor, lse, finite_lse)), 3)
        weighted = call(aten.mul.Tensor, emit_cast(slices.writer, slice_out, lse_dtype), weight)
        out = weighted if out is None else call(aten.add.Tensor, out, weighted)
    assert out is not None
    _replace_results(node, (emit_cast(slices.writer, out, dtype), total_lse))


def _emit_masked_lse(lse: fx.Node, mask: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit and return a log-sum-exp that is minus infinity for rows that see no key: some kernels return another value."""
    row_maximum = writer.call(aten.amax.default, mask, [-1])
    sees_no_key = writer.call(aten.eq.Scalar, row_maximum, -math.inf)
    return writer.call(aten.masked_fill.Scalar, lse, sees_no_key, -math.inf)


def _split_backward(node: fx.Node, slices: ConcatSlices, shows_own: Sequence[bool]) -> None:
    """Emit one attention backward per slice of keys, and replace the results of the old one.

    The gradient of the queries is the sum over slices; the gradients of keys and values are concatenated. A node that
    slices a concatenated gradient is replaced by the gradient of this slice. `shows_own` is not needed.
    """
    gradient, query, _, _, out, total_lse = node.args
    operands = _operands_by_slice(node, slices)
    call = slices.writer.move_before(node).call
    calls = [call(ATTENTION_BACKWARD, gradient, query, key, value, out, total_lse, **options) for key, value, options in operands]
    query_gradients, key_gradients, value_gradients = ([call(operator.getitem, item, i) for item in calls] for i in range(3))
    query_gradient = query_gradients[0]
    for slice_gradient in query_gradients[1:]:
        query_gradient = call(aten.add.Tensor, query_gradient, slice_gradient)
    for user in list(node.users):
        result_index = user.args[1]  # 0: query, 1: keys, 2: values
        if result_index:
            slices.slices_by_value[user] = tuple(key_gradients if result_index == 1 else value_gradients)
            _replace_slices_of_gradient(user, slices)
    slices.writer.move_before(node)  # `slices_of` has moved the insertion point
    _replace_results(node, (query_gradient, call(aten.cat.default, key_gradients, 2), call(aten.cat.default, value_gradients, 2)))


def _replace_slices_of_gradient(gradient: fx.Node, slices: ConcatSlices) -> None:
    """Replace each slice of a concatenated gradient by the gradient that was computed for this slice alone, in place.

    cat([a, b])[len(a):] -> b, and (cat([a, b]) * 2)[len(a):] -> b * 2, and so on for other values computed from the gradient.
    """
    starts = [sum(slices.lengths[:i]) for i in range(len(slices.lengths))]
    todo = list(gradient.users)
    while todo:
        node = todo.pop()
        if node not in slices.axes.shapes:
            continue
        if (i := _slice_index(node, starts, slices)) is not None:
            node.replace_all_uses_with(slices.slices_of(node.args[0])[i], propagate_meta=False)  # type: ignore[arg-type]
        elif slices.dim(node) is not None:
            todo.extend(node.users)


def _slice_index(node: fx.Node, starts: Sequence[int], slices: ConcatSlices) -> int | None:
    """Return the index of the concatenated slice that a node reads; None if it reads other rows.

    `starts` has the first row of each slice.
    """
    read = row_read(node)
    if read is None or read.is_single or read.rows.dim != slices.dim(read.tensor):
        return None
    bounds = [(start, start + length) for start, length in zip(starts, slices.lengths, strict=True)]
    return bounds.index(read.rows[1:]) if read.rows[1:] in bounds and slices.can_slice(read.tensor) else None


def _operands_by_slice(node: fx.Node, slices: ConcatSlices) -> list[tuple[fx.Node, fx.Node, dict[str, object]]]:
    """Return (keys, values, keyword arguments) for the attention over each slice of keys: its mask, if any, and the scale."""
    arguments = bound_arguments(node)
    keys, values = slices.slices_of(arguments["key"]), slices.slices_of(arguments["value"])
    mask = arguments["attn_mask"]
    masks = None if mask is None else slices.slices_of(mask)
    mask_options: list[dict[str, object]] = [{}] * len(keys) if masks is None else [{"attn_mask": item} for item in masks]
    return [
        (key, value, {**mask_option, "scale": arguments["scale"]})
        for key, value, mask_option in zip(keys, values, mask_options, strict=True)
    ]


def _replace_results(node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replace the `getitem` nodes of an operator by the given results, and erase the operator."""
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]], propagate_meta=False)  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)


SPLITTERS: dict[object, Callable[[fx.Node, ConcatSlices, Sequence[bool]], None]] = {
    ATTENTION: _split_forward,
    ATTENTION_BACKWARD: _split_backward,
}
