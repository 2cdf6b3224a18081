"""Operations of attention on the CPU, which `FlopCounterMode` counts as none: a query with each key that it sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def visible_pairs(query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None) -> int:
    """Pairs over all rows of the batch and all heads; a causal kernel aligns its mask at the first row and key."""
    rows, keys = query.shape[-2], key.shape[-2]
    heads = query.shape[:-2].numel()
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > float("-inf")
        return int(seen.sum()) * heads // seen.shape[:-2].numel()
    if is_causal:
        return heads * sum(min(row + 1, keys) for row in range(rows))
    return heads * rows * keys


def register_cpu_attention() -> None:
    """Let `FlopCounterMode` count fused attention on the CPU."""
    if ATTENTION[0] in flop_registry:
        return

    @register_flop_formula(ATTENTION[0], get_raw=True)
    def forward(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *, attn_mask: Any = None, **_: Any) -> int:
        return int(2 * visible_pairs(q, k, causal, attn_mask) * (q.shape[-1] + v.shape[-1]))

    @register_flop_formula(ATTENTION[1], get_raw=True)
    def backward(
        gradient: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dropout: float,
        causal: bool,
        *,
        attn_mask: Any = None,
        **_: Any,
    ) -> int:
        return int(2 * visible_pairs(q, k, causal, attn_mask) * (3 * q.shape[-1] + 2 * v.shape[-1]))


def counted(step: Any) -> tuple[int, int]:
    """Operations of attention and of everything else in one call of `step`."""
    register_cpu_attention()
    # torch.compile runs eagerly under a mode that does not declare that it may look inside of compiled code
    flop_counter._FlopCounterMode.ignore_compile_internals = classmethod(lambda cls: True)  # type: ignore
    with FlopCounterMode(display=False) as counter:
        step()
    by_operator = counter.get_flop_counts()["Global"]
    attention = sum(by_operator.get(target, 0) for target in ATTENTION)
    return attention, counter.get_total_flops() - attention
