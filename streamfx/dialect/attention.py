"""Fused attention as one operator for the kernels of all devices, and sliding-window attention on CUDA.

    attention(q [b h m d], k [b g n d], v [b g n e], attn_mask, is_causal, scale) -> out [b h m e], logsumexp [b h m]
    attention_window(q, k, v, left, scale) -> out, logsumexp       query i sees keys i + n - m - left .. i + n - m

The passes write `streamfx::attention` for every device's operator (`passes/rewrite/attention/sdpa_variants.py`). Loop bodies
call `kernels/flash_window.py`, which calls `streamfx::attention_window`. Each `..._backward` takes the gradient of the
output, the operands and both results, and returns (dq, dk, dv). FLOPs depend on the visible keys: `cost/flops.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamfx.dialect.declare import declare


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialized results, with the layout of the real ones: memory in the order [b m h e]."""
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _output_like(query, value), query.new_empty(query.shape[:-1], dtype=precision)


def _fake_window(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialized results with the layout of the real ones."""
    return _output_like(query, value), query.new_empty(query.shape[:3], dtype=torch.float32)


def _output_like(query: Tensor, value: Tensor) -> Tensor:
    """Return an uninitialized output [b h m e], whose memory has the order [b m h e]."""
    by_rows = query.transpose(1, 2)
    return by_rows.new_empty(*by_rows.shape[:-1], value.shape[-1]).transpose(1, 2)


def _fake_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized (dq, dk, dv): each has the layout that `empty_like` gives its operand with rows before heads."""
    dq, dk, dv = (torch.empty_like(operand.transpose(1, 2)).transpose(1, 2) for operand in (query, key, value))
    return dq, dk, dv


ATTENTION = declare(
    "attention(Tensor query, Tensor key, Tensor value, *, Tensor? attn_mask=None, bool is_causal=False, float? scale=None) "
    "-> (Tensor output, Tensor logsumexp)",
    _fake_attention,
)
ATTENTION_BACKWARD = declare(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, *, "
    "Tensor? attn_mask=None, bool is_causal=False, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    _fake_gradients,
)
ATTENTION_WINDOW = declare(
    "attention_window(Tensor query, Tensor key, Tensor value, *, int left, float? scale) -> (Tensor, Tensor)", _fake_window
)
ATTENTION_WINDOW_BACKWARD = declare(
    "attention_window_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, *, "
    "int left, float? scale) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
