"""Floating point operations of one operator, from the shapes of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def flops_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of a call: products, convolutions and fused attention; everything else counts as nothing.

    Fused attention is counted on the pairs of query and key that its own causal flag leaves visible.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    if is_fused_attention(target):
        arguments = arguments_by_name(target, args, kwargs)
        rows, keys = int(arguments["query"].shape[2]), int(arguments["key"].shape[2])
        return attention_flops(target, arguments, visible_pairs(rows, keys, bool(arguments.get("is_causal"))))
    formula = flop_registry.get(target.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def is_fused_attention(target: Any) -> bool:
    """Whether an operator is attention over queries [b h m d], keys [b g n d] and values [b g n e]."""
    return isinstance(target, torch._ops.OpOverload) and target.name().startswith("aten::_scaled_dot_product")


def visible_pairs(rows: int, keys: int, causal: bool) -> int:
    """Pairs that a kernel visits; a causal flag is aligned at the first row and the first key."""
    if not causal:
        return rows * keys
    square = min(rows, keys)
    return square * (square + 1) // 2 + (rows - square) * keys


def attention_flops(target: Any, arguments: Mapping[str, Any], pairs: int) -> int:
    """Two products per pair of query and key going forward, five going backward."""
    batch, heads, _, width = (int(size) for size in arguments["query"].shape)
    value_width = int(arguments["value"].shape[3])
    is_backward = target._schema.arguments[0].name.startswith("grad_out")
    per_pair = 3 * width + 2 * value_width if is_backward else width + value_width
    return 2 * batch * heads * pairs * per_pair


def arguments_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
