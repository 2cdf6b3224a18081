"""Remove the expansion of key and value heads in grouped-query attention.

Models repeat each key head for the query heads that share it before they call a fused kernel, which could share the heads
itself. After the rewrite, the kernel reads the heads without repeats, and the backward needs no sum over the repeats.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, node_argument, shape_of_node
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import map_getitems, rewrite_rule

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


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
    totals_by_backward = [_match_sums_over_repeats(backward, *repeated) for backward in backwards]
    if any(replacements is None for replacements in totals_by_backward):
        return None
    replacements = map_getitems(node, writer.call(ATTENTION, query, *heads, *node.args[3:], **node.kwargs), writer)
    for backward, totals in zip(backwards, totals_by_backward, strict=True):
        replacements |= _emit_gradients(backward, heads, totals or {}, writer.before(backward))
    return replacements


def match_repeated_heads(node: Any) -> fx.Node | None:
    """Return the heads [b g n d] that heads [b g*r n d] repeat r times each, or None."""
    if not isinstance(node, fx.Node) or node.target not in VIEWS:
        return None
    source: Any = operand_of_view(node)
    if source.target is not aten.expand.default or source.args[0].target is not aten.unsqueeze.default:
        return None
    heads = source.args[0].args[0]
    if source.args[0].args[1] != 2 or len(shape_of_node(heads)) != 4:
        return None
    b, g, n, d = shape_of_node(heads)
    repeated = shape_of_node(source)
    if (*repeated[:2], *repeated[3:]) != (b, g, n, d) or shape_of_node(node) != (b, g * repeated[2], n, d):
        return None
    return heads


def operand_of_view(node: fx.Node) -> fx.Node:
    """Return the operand of a view, before the copy that the view may need."""
    source = node_argument(node)
    return node_argument(source) if source.target is aten.clone.default else source


def _match_sums_over_repeats(node: fx.Node, *repeated: tuple[Size, ...]) -> dict[int, list[fx.Node]] | None:
    """Return the sums over the repeats of a backward's results 1 and 2, the gradients of keys and values, by result.

    `repeated` are the shapes [b g r n d] of keys and values before their heads were merged. Return None if a gradient has
    any other use.
    """
    totals_by_result: dict[int, list[fx.Node]] = {1: [], 2: []}
    for getitem in node.users:
        if getitem.target is not operator.getitem:
            return None
        result_index = int_argument(getitem, 1)
        if result_index == 0:
            continue
        for user in getitem.users:
            total = _match_sum_after_view(user, repeated[result_index - 1])
            if total is None:
                return None
            totals_by_result[result_index].append(total)
    return totals_by_result


def _match_sum_after_view(node: fx.Node, repeated: tuple[Size, ...]) -> fx.Node | None:
    """Return the sum of a gradient over the repeats of each head, if a view splits its heads as the repeats were merged."""
    if node.target not in VIEWS or shape_of_node(node) != repeated or len(node.users) != 1:
        return None
    (total,) = node.users
    if total.target is not aten.sum.dim_IntList or list(bound_arguments(total)["dim"] or ()) not in ([2], [-3]):
        return None
    if total.meta[VALUE].dtype != node.meta[VALUE].dtype:
        return None
    if len(shape_of_node(total)) == 4:
        return total
    users = list(total.users)
    are_squeezed = users and all(
        user.target is aten.squeeze.dim and user.args[1] in (2, -3) and len(shape_of_node(user)) == 4 for user in users
    )
    return users[0] if are_squeezed and len(users) == 1 else None


def _emit_gradients(
    node: fx.Node, heads: tuple[Any, Any], totals_by_result: dict[int, list[fx.Node]], writer: GraphWriter
) -> dict[fx.Node, fx.Node]:
    """Emit a backward call with the heads that are not repeated, and map the old gradients to its results."""
    gradients = writer.call(ATTENTION_BACKWARD, *node.args[:2], *heads, *node.args[4:], **node.kwargs)
    of_query, of_key, of_value = (writer.call(operator.getitem, gradients, i) for i in range(3))
    replacements = {getitem: of_query for getitem in node.users if int_argument(getitem, 1) == 0}
    return replacements | {
        total: of_heads for i, of_heads in ((1, of_key), (2, of_value)) for total in totals_by_result.get(i, ())
    }
