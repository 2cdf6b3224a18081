"""Replace the fused attention operators of all devices by one operator, `streamfx::attention`, and their backwards.

PyTorch has one operator per kernel (flash on CPU, flash on CUDA, memory-efficient, cuDNN). Forward and backward are
replaced together or not at all, because a kernel's backward only reads its own forward's log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.kernels.sdpa import KERNELS
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import emit_getitems, getitems_by_index, rewrite_rule

aten = torch.ops.aten

BACKWARD_OF: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention.default: aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default: aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default: aten._scaled_dot_product_cudnn_attention_backward.default,
}
COMMON_NAMES = {"grad_out_": "grad_out", "log_sumexp": "logsumexp", "attn_bias": "attn_mask"}  # schemas use different names
GRADIENTS = (0, 1, 2)


@rewrite_rule(*BACKWARD_OF)
def sdpa_to_attention(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """flash(q, k, v, 0.0, True) -> out, lse, seeds ...        ->   attention(q, k, v, is_causal=True) -> out, lse
    flash_backward(d, q, k, v, out, lse, seeds ..., True)   ->   attention_backward(d, q, k, v, out, lse, is_causal=True)

    Applies without dropout, and if the bias needs no gradient.
    """
    backwards = _backward_calls(node) if node.meta[VALUE][0].device.type in KERNELS else None
    if backwards is None:
        return None
    replacements = _emit_call(node, ATTENTION, writer)
    for backward in backwards:
        replacements |= _emit_call(backward, ATTENTION_BACKWARD, writer.move_before(backward))
    return replacements


def _backward_calls(node: fx.Node) -> list[fx.Node] | None:
    """Return the backward calls of a forward call, in graph order; None if the call cannot be replaced.

    It cannot if it uses dropout, or if anything but a backward of this call reads a result other than the first (`out`):
    the log-sum-exp, a random seed.
    """
    arguments, getitems = _common_arguments(node), getitems_by_index(node)
    if getitems is None or arguments["dropout_p"] != 0.0 or arguments.get("return_debug_mask") or _is_aligned_at_end(node):
        return None
    readers = {
        user for result_index, items in getitems.items() if result_index != 0 for getitem in items for user in getitem.users
    }
    if any(user.target is not BACKWARD_OF[node.target] or not _is_backward_of(user, node, getitems) for user in readers):
        return None
    return [user for user in node.graph.nodes if user in readers]


def _is_aligned_at_end(node: fx.Node) -> bool:
    """Return whether a causal call aligns the last row with the last key, as CUDA's flash attention does.

    `streamfx::attention` aligns the first row with the first key. Both are the same for as many rows as keys: return False.
    """
    arguments = _common_arguments(node)
    rows, keys = (shape_of_node(arguments[name])[2] for name in ("query", "key"))
    return node.target is aten._scaled_dot_product_flash_attention.default and arguments["is_causal"] and rows != keys


def _is_backward_of(node: fx.Node, forward: fx.Node, forward_results: dict[int, list[fx.Node]]) -> bool:
    """Return whether a backward call reads the operands, options and results of this forward call.

    `forward_results` has the forward call's `getitem` nodes by result index (0: out, 1: log-sum-exp). Of the backward's
    results, only the gradients of query, key and value may be used, not the gradient of a bias.
    """
    arguments, forward_arguments, results = _common_arguments(node), _common_arguments(forward), getitems_by_index(node)
    has_equal_operands = all(
        arguments.get(name) == forward_arguments.get(name)
        for name in ("query", "key", "value", "attn_mask", "is_causal", "scale")
    )
    reads_results = arguments["out"] in forward_results.get(0, ()) and arguments["logsumexp"] in forward_results.get(1, ())
    return (
        has_equal_operands
        and reads_results
        and arguments["dropout_p"] == 0.0
        and results is not None
        and set(results) <= set(GRADIENTS)
    )


def _common_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a device's operator by name: by the names of `streamfx::attention` if it has the argument."""
    return {COMMON_NAMES.get(name, name): value for name, value in bound_arguments(node).items()}


def _emit_call(node: fx.Node, target: Any, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Emit `target` (`streamfx::attention` or its backward) with the arguments of a device's operator `node`.

    Return {old getitem: new getitem} for the results that both have. Options that are not set are omitted.
    """
    arguments = _common_arguments(node)
    names = [argument.name for argument in target._schema.arguments]
    optional = {"attn_mask", "is_causal", "scale"}
    options = {name: arguments[name] for name in names if name in optional and name in arguments}
    set_options = {
        name: value for name, value in options.items() if value is not None and value is not False
    }  # keep a scale of 0.0
    replacement = writer.call(target, *(arguments[name] for name in names if name not in optional), **set_options)
    return emit_getitems(node, replacement, writer)
