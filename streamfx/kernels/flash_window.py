"""Sliding-window attention on CUDA: one call of a kernel that masks the keys outside the window, instead of a call with
a bias.

    attention_window(q [b h m d], k [b g n d], v [b g n e], left)       query i sees keys i + n - m - left .. i + n - m

Sizes: b batch, h query heads, g heads of keys and values, m queries, n keys, d and e widths of a head. `bias` is added to the
scores, `causal` is one of `plain_attention.Causal`, `scale` multiplies the scores (None: 1 / sqrt(d)).

PyTorch's sources under aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp: mha_fwd and mha_bwd take
`window_size_left` and `window_size_right`, and mask.h aligns them at the last query and key. Each device's kernels are
tested once on known values. If they raise an error or differ, a bias replaces the window. Operands that flash attention
does not support go to `efficient_bottom_right.py`, even without a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.attention import ATTENTION_WINDOW, ATTENTION_WINDOW_BACKWARD
from streamfx.dialect.declare import implement
from streamfx.kernels import cuda_attention, cuda_cudnn, efficient_bottom_right, kernel_selftest, layouts, plain_attention
from streamfx.kernels.plain_attention import BottomRightCausal, Causal

aten = torch.ops.aten


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [b h m e] and the log-sum-exp [b h m] of a chunk's queries.

    Windows take one call without `bias`; any other mask goes to `cuda_attention.forward`.
    """
    left = _left(causal, query, key, value, scale)
    if left is None:
        return cuda_attention.forward(query, key, value, bias, causal, scale)
    query, key, value, scale = _to_kernel_layout(query, key, value, scale)
    out, lse = ATTENTION_WINDOW(query, key, value, left=left, scale=scale)
    return out, lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); `gradient` is the gradient of the output, `out` and `lse` are the results of `forward`.

    Windows take one call, which ignores `bias`; any other mask goes to `cuda_attention.backward`.
    """
    left = _left(causal, query, key, value, scale)
    if left is None:
        return cuda_attention.backward(gradient, query, key, value, out, lse, bias, causal, scale)
    query, key, value, scale = _to_kernel_layout(query, key, value, scale)
    gradient, out = cuda_attention.results_to_kernel_layout(gradient, out, query)
    dq, dk, dv = ATTENTION_WINDOW_BACKWARD(gradient, query, key, value, out, lse, left=left, scale=scale)
    return dq, dk, dv


def supports_bottom_right(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, bottom_right: BottomRightCausal
) -> bool:
    """Return whether one call computes queries that end at the last key, with a bottom-right mask.

    False for a causal mask if cuDNN supports both the past and the diagonal, because two calls of cuDNN are faster.
    """
    if bottom_right.left is None and cuda_cudnn.supports_past_and_diagonal(query, key, value, scale):
        return False
    return cuda_attention.flash_supports(query, value, scale) or efficient_bottom_right.supports(query, scale, bottom_right)


def _left(causal: Causal, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> int | None:
    """Return how many keys before its own a query sees; None if the call does not need the window's kernels.

    If flash attention does not support the operands, a bottom-right causal mask counts as a window over all keys: then
    `efficient_bottom_right.py` runs it.
    """
    if not isinstance(causal, BottomRightCausal):
        return None
    if causal.left is not None:
        return min(causal.left, key.shape[2])
    return None if cuda_attention.flash_supports(query, value, scale) else key.shape[2]


def _to_kernel_layout(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Return (query, key, value, scale) with padded and aligned heads, as the kernels load them.

    Keys and values are repeated for all query heads, unless flash attention supports the operands.
    """
    query, key, value, scale = cuda_attention.to_kernel_layout(query, key, value, scale)
    if not cuda_attention.flash_supports(query, value, scale):
        key, value = (plain_attention.for_all_heads(heads, query) for heads in (key, value))
    return query, key, value, scale


def _forward(query: Tensor, key: Tensor, value: Tensor, *, left: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Implement `streamfx::attention_window`, by the first kernel that supports it; return the output and the log-sum-exp.

    If the window of the device's flash attention is wrong, a bias replaces the window.
    """
    if not cuda_attention.flash_supports(query, value, scale):
        return efficient_bottom_right.forward(query, key, value, left, scale)
    if masks_correctly(query.device, query.dtype, query.shape[3]):
        return _flash(query, key, value, left, scale)
    bias = plain_attention.causal_bias(query, key, BottomRightCausal(left))
    return cuda_attention.forward(query, key, value, bias, False, scale)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    left: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `streamfx::attention_window_backward`, by the kernel that ran the forward; return (dq, dk, dv)."""
    if not cuda_attention.flash_supports(query, value, scale):
        return efficient_bottom_right.backward(grad_out, query, key, value, out, logsumexp, left, scale)
    if masks_correctly(query.device, query.dtype, query.shape[3]):
        return _flash_backward(grad_out, query, key, value, out, logsumexp, left, scale)
    bias = plain_attention.causal_bias(query, key, BottomRightCausal(left))
    return cuda_attention.backward(grad_out, query, key, value, out, logsumexp, bias, False, scale)


@kernel_selftest.selftest("flash attention in a window")
def masks_correctly(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether the device's flash attention masks the keys outside a window at this head width, by a test on a few rows."""
    return kernel_selftest.matches_reference(
        lambda q, k, v: _flash(q, k, v, 3, None),
        lambda g, q, k, v, out, lse: _flash_backward(g, q, k, v, out, lse, 3, None),
        BottomRightCausal(3),
        kernel_selftest.AttentionSizes(device, dtype, (2, 7), (1, 12), width),
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, left: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Run flash attention with a window of `left` keys before a query's own key; return the output and the log-sum-exp."""
    by_rows = (operand.transpose(1, 2) for operand in (query, key, value))
    ends = (None, None, query.shape[2], key.shape[2])
    window = {"window_size_left": left, "window_size_right": 0}
    out, lse, *_ = aten._flash_attention_forward(*by_rows, *ends, 0.0, False, False, scale=scale, **window)
    return out.transpose(1, 2), lse


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, left: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of flash attention with a window; return (dq, dk, dv)."""
    out, lse = layouts.align(out), lse.contiguous()  # flash_api.cpp: set_params_fprop reads its pointer and ignores its strides
    by_rows = (operand.transpose(1, 2) for operand in (gradient, query, key, value, out))
    ends = (None, None, query.shape[2], key.shape[2])
    window = {"window_size_left": left, "window_size_right": 0}
    states = cuda_attention.no_dropout(query.device)
    results = aten._flash_attention_backward(*by_rows, lse, *ends, 0.0, False, *states, scale=scale, **window)
    dq, dk, dv = (result.transpose(1, 2) for result in results)
    return dq, dk, dv


implement(ATTENTION_WINDOW, _forward)
implement(ATTENTION_WINDOW_BACKWARD, _backward)
