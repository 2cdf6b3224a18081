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
from streamfx.ir.joint import int_argument, is_tensor, shape_of_node
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.pattern import (
    REST,
    Either,
    Op,
    Where,
    either,
    emit_getitems,
    getitems_by_index,
    match_uses,
    op,
    rewrite_rule,
)

aten = torch.ops.aten
VIEWS = of_kind(Kind.RESHAPE)


def _repeated(name: str) -> Op:
    """Return a pattern of heads [b (g r) n d] that repeat g heads r times each; it captures the heads [b g n d] as `name`.

    The capture "repeated_{name}" are the repeats [b g r n d], and "all_{name}" the result.
    """
    repeats = op(aten.expand.default, op(aten.unsqueeze.default, name, 2), REST, name=f"repeated_{name}")
    return op(VIEWS, either(repeats, op(aten.clone.default, repeats, REST)), REST, name=f"all_{name}")


@rewrite_rule(op(ATTENTION, "query", _repeated("key"), _repeated("value"), REST))
def remove_repeated_heads(
    node: fx.Node,
    writer: GraphWriter,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    repeated_key: fx.Node,
    repeated_value: fx.Node,
    all_key: fx.Node,
    all_value: fx.Node,
) -> dict[fx.Node, fx.Node] | None:
    """attention(q, view(expand(unsqueeze(k, 2)))) -> attention(q, k)
    sum(view(dk, [b g r n d]), 2)               -> dk

    Applies if neither forward nor backward uses the repeats in another way.
    """
    are_groups = _are_groups(key, repeated_key, all_key) and _are_groups(value, repeated_value, all_value)
    if not are_groups or shape_of_node(key)[1] != shape_of_node(value)[1]:
        return None
    same_call = op(ATTENTION_BACKWARD, ..., *node.args[:3], REST)
    backwards = [user for user in query.users if same_call.match(user) is not None]
    sums_by_backward = [_match_sums_over_repeats(backward, repeated_key, repeated_value) for backward in backwards]
    if any(sums is None for sums in sums_by_backward):
        return None
    replacements = emit_getitems(node, writer.call(ATTENTION, query, key, value, *node.args[3:], **node.kwargs), writer)
    for backward, sums in zip(backwards, sums_by_backward, strict=True):
        replacements |= _emit_gradients(backward, (key, value), sums or {}, writer.move_before(backward))
    return replacements


def _are_groups(heads: fx.Node, repeated: fx.Node, result: fx.Node) -> bool:
    """Return whether the three shapes are [b g n d], [b g r n d] and [b (g r) n d]."""
    if len(shape_of_node(heads)) != 4:
        return False
    b, g, n, d = shape_of_node(heads)
    r = shape_of_node(repeated)[2]
    return shape_of_node(repeated) == (b, g, r, n, d) and shape_of_node(result) == (b, g * r, n, d)


def _match_sums_over_repeats(backward: fx.Node, *repeated: fx.Node) -> dict[int, list[fx.Node]] | None:
    """Return the sums over the repeats that read an attention backward's gradients of keys (result 1) and values (result 2).

    The sums are by result index. `repeated` are the keys and values [b g r n d] before their heads were merged. Return None
    if a gradient has any other use than such a sum.
    """
    getitems = getitems_by_index(backward)
    sums_by_result: dict[int, list[fx.Node]] = {1: [], 2: []}
    for result_index, sums in sums_by_result.items():
        sum_over_repeats = _sum_over_repeats(shape_of_node(repeated[result_index - 1]))
        for gradient in (getitems or {}).get(result_index, ()):
            uses = match_uses("gradient", gradient, {"sums": sum_over_repeats}, {})
            if uses is None:
                return None
            sums += uses.get("sums", ())
    return None if getitems is None else sums_by_result


def _sum_over_repeats(shape: tuple[Size, ...]) -> Either:
    """Return a pattern of the sum [b g n d] of a gradient that is viewed in the shape [b g r n d]."""
    grouped = Where(lambda view: is_tensor(view) and shape_of_node(view) == shape, op(VIEWS, "gradient", REST))
    kept = op(aten.sum.dim_IntList, grouped, [2], True)  # with a dimension of size one, which a squeeze removes
    return either(op(aten.sum.dim_IntList, grouped, [2]), op(aten.squeeze.dim, kept, 2))


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
