"""Replace the fused attention operators of all devices by one operator, `streamfx::attention`, and their backwards.

PyTorch has one operator per kernel (flash on CPU, flash on CUDA, memory-efficient, cuDNN). Forward and backward are
replaced together or not at all, because a kernel's backward only reads its own forward's log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.kernels.sdpa import KERNELS
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import REST, Captures, Op, emit_getitems, getitems_by_index, op, readers_of, rewrite_rule

aten = torch.ops.aten

SHARED: dict[str, Any] = {name: name for name in ("query", "key", "value", "is_causal", "scale")} | {"dropout_p": 0.0}
SAVED = {"out": "out", "logsumexp": "lse"}
MASK, BIAS = {"attn_mask": "mask"}, {"attn_bias": "mask"}
NO_DEBUGGING: dict[str, Any] = {"return_debug_mask": False}
FORWARDS = (
    op(aten._scaled_dot_product_flash_attention_for_cpu.default, REST, **SHARED, **MASK),
    op(aten._scaled_dot_product_flash_attention.default, REST, **SHARED, **NO_DEBUGGING),
    op(aten._scaled_dot_product_efficient_attention.default, REST, **SHARED, **BIAS),
    op(aten._scaled_dot_product_cudnn_attention.default, REST, **SHARED, **BIAS, **NO_DEBUGGING),
)
BACKWARDS = (  # of each forward
    op(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, "gradient", REST, **SHARED, **SAVED, **MASK),
    op(aten._scaled_dot_product_flash_attention_backward.default, "gradient", REST, **SHARED, **SAVED),
    op(aten._scaled_dot_product_efficient_attention_backward.default, "gradient", REST, **SHARED, **SAVED, **BIAS),
    op(aten._scaled_dot_product_cudnn_attention_backward.default, "gradient", REST, **SHARED, **SAVED, **BIAS),
)
BACKWARD_OF: dict[Any, Op] = {
    target: backward for forward, backward in zip(FORWARDS, BACKWARDS, strict=True) for target in forward.targets
}


@rewrite_rule(*FORWARDS)
def sdpa_to_attention(node: fx.Node, writer: GraphWriter, captures: Captures) -> dict[fx.Node, fx.Node] | None:
    """flash(q, k, v, 0.0, True) -> out, lse, seeds ...        ->   attention(q, k, v, is_causal=True) -> out, lse
    flash_backward(d, q, k, v, out, lse, seeds ..., True)   ->   attention_backward(d, q, k, v, out, lse, is_causal=True)

    Applies without dropout, and if the bias needs no gradient.
    """
    operands, getitems = [captures[name] for name in ("query", "key", "value")], getitems_by_index(node)
    rows, keys = (shape_of_node(operand)[2] for operand in operands[:2])
    # CUDA's flash attention aligns the last row with the last key, `streamfx::attention` the first ones
    is_aligned_at_end = node.target is aten._scaled_dot_product_flash_attention.default and captures["is_causal"] and rows != keys
    if getitems is None or is_aligned_at_end or operands[0].meta[VALUE].device.type not in KERNELS:
        return None
    matches = {reader: _match_backward(reader, BACKWARD_OF[node.target], getitems, captures) for reader in readers_of(getitems)}
    if None in matches.values():
        return None
    options = {"attn_mask": captures.get("mask"), "is_causal": captures["is_causal"] or None, "scale": captures["scale"]}
    options = {name: value for name, value in options.items() if value is not None}
    replacements = emit_getitems(node, writer.call_alike(ATTENTION, *operands, **options), writer)
    for backward, match in matches.items():
        arguments = match["gradient"], *operands, match["out"], match["lse"]  # type: ignore[index]
        gradients = writer.move_before(backward).call_alike(ATTENTION_BACKWARD, *arguments, **options)
        replacements |= emit_getitems(backward, gradients, writer)
    return replacements


def _match_backward(
    node: fx.Node, backward: Op, forward_results: Mapping[int, Sequence[fx.Node]], captures: Captures
) -> Captures | None:
    """Match a backward call that reads the operands, options and results of a forward call; return None for any other node.

    `forward_results` has the forward call's `getitem` nodes by result index (0: out, 1: log-sum-exp). Of the backward's
    results, only the gradients of query, key and value may be used, not the gradient of a bias.
    """
    match, results = backward.match(node, captures), getitems_by_index(node)
    if match is None or results is None or not set(results) <= {0, 1, 2}:
        return None
    reads_results = match["out"] in forward_results.get(0, ()) and match["lse"] in forward_results.get(1, ())
    return match if reads_results else None
