"""Remove the expansion of key and value heads in grouped-query attention.

Models repeat each key head for the query heads that share it before they call a fused kernel, which could share the heads
itself. After the rewrite, the kernel reads the heads without repeats, and the backward needs no sum over the repeats.
In shapes, g is the number of key heads and r the number of repeats of each: there are g * r query heads.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import bound_arguments, int_argument, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import emit_getitems, rewrite_rule

aten = torch.ops.aten


@rewrite_rule(ATTENTION)
def remove_repeated_heads(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """attention(q, view(expand(unsqueeze(k, 2)))) -> attention(q, k)
    sum(view(dk, [b g r n d]), 2)               -> dk

    Applies if neither forward nor backward uses the repeats in another way.
    """
    query, key, value = (node_argument(node, i) for i in range(3))
    heads = match_repeated_heads(key), match_repeated_heads(value)
    if heads[0] is None or heads[1] is None or shape_of_node(heads[0])[1] != shape_of_node(heads[1])[1]:
        return None
    repeated = tuple(shape_of_node(operand_of_view(heads)) for heads in (key, value))
    backwards = [user for user in query.users if user.target is ATTENTION_BACKWARD and user.args[1:4] == (query, key, value)]
    sums_by_backward = [_match_sums_over_repeats(backward, *repeated) for backward in backwards]
    if any(sums is None for sums in sums_by_backward):
        return None
    replacements = emit_getitems(node, writer.call(ATTENTION, query, *heads, *node.args[3:], **node.kwargs), writer)
    for backward, sums in zip(backwards, sums_by_backward, strict=True):
        replacements |= _emit_gradients(backward, heads, sums or {}, writer.move_before(backward))
    return replacements


def match_repeated_heads(node: Any) -> fx.Node | None:
    """Return the heads [b g n d] that `node` [b (g r) n d] repeats r times each; None if it does not repeat heads.

    view(expand(unsqueeze(heads, 2), [b, g, r, n, d]), [b, g * r, n, d]) -> heads
    """
    if not isinstance(node, fx.Node) or not is_kind(node, Kind.RESHAPE):
        return None
    expanded: Any = operand_of_view(node)
    if expanded.target is not aten.expand.default or expanded.args[0].target is not aten.unsqueeze.default:
        return None
    heads, unsqueezed_dim = expanded.args[0].args
    if unsqueezed_dim != 2 or len(shape_of_node(heads)) != 4:
        return None
    b, g, n, d = shape_of_node(heads)
    expanded_shape = shape_of_node(expanded)
    r = expanded_shape[2]
    if expanded_shape != (b, g, r, n, d) or shape_of_node(node) != (b, g * r, n, d):
        return None
    return heads


def operand_of_view(node: fx.Node) -> fx.Node:
    """Return the operand of a view; if a copy makes it contiguous for the view, the operand of the copy."""
    operand = node_argument(node)
    return node_argument(operand) if operand.target is aten.clone.default else operand


def _match_sums_over_repeats(node: fx.Node, *repeated: tuple[Size, ...]) -> dict[int, list[fx.Node]] | None:
    """Return the sums over the repeats that read an attention backward's gradients of keys (result 1) and values (result 2).

    The sums are by result index. `repeated` are the shapes [b g r n d] of keys and values before their heads were merged.
    Return None if a gradient has any other use than such a sum.
    """
    sums_by_result: dict[int, list[fx.Node]] = {1: [], 2: []}
    for getitem in node.users:
        if getitem.target is not operator.getitem:
            return None
        result_index = int_argument(getitem, 1)
        if result_index == 0:  # the gradient of the queries
            continue
        for user in getitem.users:
            sum_over_repeats = _match_sum_after_view(user, repeated[result_index - 1])
            if sum_over_repeats is None:
                return None
            sums_by_result[result_index].append(sum_over_repeats)
    return sums_by_result


def _match_sum_after_view(node: fx.Node, repeated: tuple[Size, ...]) -> fx.Node | None:
    """Return the sum [b g n d] over the repeats of each head, if `node` is a view [b g r n d] that only this sum reads.

    `repeated` is the shape [b g r n d]. The sum may keep the dimension of repeats if only a squeeze uses it: then return
    the squeeze. Return None if nothing matches.
    """
    if not is_kind(node, Kind.RESHAPE) or shape_of_node(node) != repeated or len(node.users) != 1:
        return None
    (repeats_sum,) = node.users
    if repeats_sum.target is not aten.sum.dim_IntList or list(bound_arguments(repeats_sum)["dim"] or ()) not in ([2], [-3]):
        return None
    if repeats_sum.meta[VALUE].dtype != node.meta[VALUE].dtype:
        return None
    if len(shape_of_node(repeats_sum)) == 4:
        return repeats_sum
    if len(repeats_sum.users) != 1:
        return None
    (user,) = repeats_sum.users
    is_squeeze = user.target is aten.squeeze.dim and user.args[1] in (2, -3) and len(shape_of_node(user)) == 4
    return user if is_squeeze else None


def _emit_gradients(
    node: fx.Node, heads: tuple[Any, Any], sums_by_result: dict[int, list[fx.Node]], writer: GraphWriter
) -> dict[fx.Node, fx.Node]:
    """Emit an attention backward that reads the key and value heads without repeats; return {old gradient: new gradient}.

    `node` is the old backward call. Its gradients of keys and values are replaced where they have been summed over the
    repeats: `sums_by_result` holds these sums for result 1 (keys) and result 2 (values).
    """
    gradients = writer.call(ATTENTION_BACKWARD, *node.args[:2], *heads, *node.args[4:], **node.kwargs)
    query_gradient, key_gradient, value_gradient = (writer.call(operator.getitem, gradients, i) for i in range(3))
    replacements = {getitem: query_gradient for getitem in node.users if int_argument(getitem, 1) == 0}
    replacements |= dict.fromkeys(sums_by_result.get(1, ()), key_gradient)
    replacements |= dict.fromkeys(sums_by_result.get(2, ()), value_gradient)
    return replacements
