"""Every device's fused attention as one operator.

    flash(q, k, v, 0.0, True) -> out, lse, seeds ...         ->   attention(q, k, v, is_causal=True) -> out, lse
    flash_backward(g, q, k, v, out, lse, seeds ..., True)    ->   attention_backward(g, q, k, v, out, lse, is_causal=True)

Both halves change together, or neither: the log-sum-exp of one kernel is no use to the backward of another.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, shape_of_node
from streamfx.runtime.kernels import ATTENTION, ATTENTION_BACKWARD, KERNELS

aten = torch.ops.aten

BACKWARD_OF: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention.default: aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default: aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default: aten._scaled_dot_product_cudnn_attention_backward.default,
}
NAMES = {"grad_out_": "grad_out", "log_sumexp": "logsumexp", "attn_bias": "attn_mask"}  # where schemas disagree
GRADIENTS = (0, 1, 2)


def unify_attention(graph: fx.Graph) -> None:
    """Write fused attention without dropout, and with no gradient of its bias, as `streamfx::attention`, in place."""
    for node in list(graph.nodes):
        if node.target in BACKWARD_OF and node.meta["val"][0].device.type in KERNELS:
            backwards = _backwards(node)
            if backwards is not None:
                _rewrite(node, ATTENTION)
                for other in backwards:
                    _rewrite(other, ATTENTION_BACKWARD)


def _backwards(node: fx.Node) -> list[fx.Node] | None:
    """The backward calls of a forward call; None where its results go anywhere else, or it cannot be replaced."""
    arguments, parts = _arguments(node), _parts(node)
    if parts is None or arguments["dropout_p"] != 0.0 or arguments.get("return_debug_mask") or _is_aligned_at_end(node):
        return None
    inner = {user for position, group in parts.items() if position != 0 for part in group for user in part.users}
    if any(user.target is not BACKWARD_OF[node.target] or not _is_backward_of(user, node, parts) for user in inner):
        return None
    return [user for user in node.graph.nodes if user in inner]


def _is_aligned_at_end(node: fx.Node) -> bool:
    """Whether row i sees other keys than 0 .. i: flash attention of CUDA puts the last row beside the last key."""
    arguments = _arguments(node)
    rows, keys = (shape_of_node(arguments[name])[2] for name in ("query", "key"))
    return node.target is aten._scaled_dot_product_flash_attention.default and arguments["is_causal"] and rows != keys


def _is_backward_of(node: fx.Node, forward: fx.Node, parts: dict[int, list[fx.Node]]) -> bool:
    own, given, results = _arguments(node), _arguments(forward), _parts(node)
    same = all(own.get(name) == given.get(name) for name in ("query", "key", "value", "attn_mask", "is_causal", "scale"))
    linked = own["out"] in parts.get(0, ()) and own["logsumexp"] in parts.get(1, ())
    return same and linked and own["dropout_p"] == 0.0 and results is not None and set(results) <= set(GRADIENTS)


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in bound_arguments(node).items()}


def _parts(node: fx.Node) -> dict[int, list[fx.Node]] | None:
    """The results in use, by position."""
    parts: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        parts.setdefault(int_argument(user, 1), []).append(user)
    return parts


def _rewrite(node: fx.Node, target: Any) -> None:
    """Call `target` instead; the node keeps its name, so that reports find it."""
    given = _arguments(node)
    names = [argument.name for argument in target._schema.arguments]
    optional = {"attn_mask", "is_causal", "scale"}
    node.target = target
    node.args = tuple(given[name] for name in names if name not in optional)
    others = {name: given[name] for name in names if name in optional and name in given}
    node.kwargs = {name: value for name, value in others.items() if value is not None and value is not False}  # 0.0 is a scale
    fakes = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*fakes[0], **fakes[1])
    for part in list(node.users):
        position = int_argument(part, 1)
        if position < len(node.meta["val"]):
            part.meta["val"] = node.meta["val"][position]
        elif not part.users:
            node.graph.erase_node(part)
