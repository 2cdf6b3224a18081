"""Sliding-window attention on CUDA: one call of a kernel that masks the keys outside the window, instead of a call with
a bias.

    attention_window(q [b h m d], k [b g n d], v [b g n e], left)       query i sees keys i + n - m - left .. i + n - m

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
from streamfx.kernels import cuda_attention, cuda_cudnn, efficient_bottom_right, kernel_selftest, layouts
from streamfx.kernels.attention_call import AttentionCall, BottomRightCausal, Gradients, Result, for_all_heads
from streamfx.kernels.plain_attention import causal_bias

aten = torch.ops.aten


def forward(call: AttentionCall) -> Result:
    """Return the output and the log-sum-exp.

    Windows take one call, which ignores the bias; any other mask goes to `cuda_attention.forward`.
    """
    left = _left(call)
    if left is None:
        return cuda_attention.forward(call)
    query, key, value, _, _, scale = _to_kernel_layout(call)
    out, lse = ATTENTION_WINDOW(query, key, value, left=left, scale=scale)
    return out, lse


def backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv).

    Windows take one call, which ignores the bias; any other mask goes to `cuda_attention.backward`.
    """
    left = _left(call)
    if left is None:
        return cuda_attention.backward(call, gradient, out, lse)
    query, key, value, _, _, scale = _to_kernel_layout(call)
    gradient, out = cuda_attention.results_to_kernel_layout(gradient, out, query)
    dq, dk, dv = ATTENTION_WINDOW_BACKWARD(gradient, query, key, value, out, lse, left=left, scale=scale)
    return dq, dk, dv


def supports_bottom_right(call: AttentionCall, bottom_right: BottomRightCausal) -> bool:
    """Return whether one call computes queries that end at the last key, with this mask.

    False for a causal mask if cuDNN supports both the past and the diagonal, because two calls of cuDNN are faster.
    """
    if bottom_right.left is None and cuda_cudnn.supports_past_and_diagonal(call):
        return False
    return cuda_attention.flash_supports(call) or efficient_bottom_right.supports(call, bottom_right)


def _left(call: AttentionCall) -> int | None:
    """Return how many keys before its own a query sees; None if the call does not need the window's kernels.

    If flash attention does not support the operands, a bottom-right causal mask counts as a window over all keys: then
    `efficient_bottom_right.py` runs it.
    """
    if not isinstance(call.causal, BottomRightCausal):
        return None
    if call.causal.left is not None:
        return min(call.causal.left, call.key.shape[2])
    return None if cuda_attention.flash_supports(call) else call.key.shape[2]


def _to_kernel_layout(call: AttentionCall) -> AttentionCall:
    """Return the call with padded and aligned heads, as the kernels load them.

    Keys and values are repeated for all query heads, unless flash attention supports the operands.
    """
    call = cuda_attention.to_kernel_layout(call)
    return call if cuda_attention.flash_supports(call) else for_all_heads(call)


def _forward(query: Tensor, key: Tensor, value: Tensor, *, left: int, scale: float | None) -> Result:
    """Implement `streamfx::attention_window`, by the first kernel that supports it; return the output and the log-sum-exp.

    If the window of the device's flash attention is wrong, a bias replaces the window.
    """
    call = AttentionCall(query, key, value, scale=scale)
    if not cuda_attention.flash_supports(call):
        return efficient_bottom_right.forward(call, left)
    if masks_correctly(query.device, query.dtype, query.shape[3]):
        return _flash(call, left)
    return cuda_attention.forward(call._replace(bias=causal_bias(query, key, BottomRightCausal(left))))


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
) -> Gradients:
    """Implement `streamfx::attention_window_backward`, by the kernel that ran the forward; return (dq, dk, dv)."""
    call = AttentionCall(query, key, value, scale=scale)
    if not cuda_attention.flash_supports(call):
        return efficient_bottom_right.backward(call, left, grad_out, out, logsumexp)
    if masks_correctly(query.device, query.dtype, query.shape[3]):
        return _flash_backward(call, left, grad_out, out, logsumexp)
    call = call._replace(bias=causal_bias(query, key, BottomRightCausal(left)))
    return cuda_attention.backward(call, grad_out, out, logsumexp)


@kernel_selftest.selftest("flash attention in a window")
def masks_correctly(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether the device's flash attention masks the keys outside a window at this head width, by a test on a few rows."""
    return kernel_selftest.matches_reference(
        lambda call: _flash(call, 3),
        lambda call, gradient, out, lse: _flash_backward(call, 3, gradient, out, lse),
        BottomRightCausal(3),
        kernel_selftest.AttentionSizes(device, dtype, (2, 7), (1, 12), width),
    )


def _flash(call: AttentionCall, left: int) -> Result:
    """Run flash attention with a window of `left` keys before a query's own key; return the output and the log-sum-exp."""
    by_rows = (operand.transpose(1, 2) for operand in call[:3])
    ends = (None, None, call.query.shape[2], call.key.shape[2])
    window = {"window_size_left": left, "window_size_right": 0}
    out, lse, *_ = aten._flash_attention_forward(*by_rows, *ends, 0.0, False, False, scale=call.scale, **window)
    return out.transpose(1, 2), lse


def _flash_backward(call: AttentionCall, left: int, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Run the backward of flash attention with a window; return (dq, dk, dv)."""
    out, lse = layouts.align(out), lse.contiguous()  # flash_api.cpp: set_params_fprop reads its pointer and ignores its strides
    by_rows = (operand.transpose(1, 2) for operand in (gradient, *call[:3], out))
    ends = (None, None, call.query.shape[2], call.key.shape[2])
    window = {"window_size_left": left, "window_size_right": 0}
    states = cuda_attention.no_dropout(call.query.device)
    results = aten._flash_attention_backward(*by_rows, lse, *ends, 0.0, False, *states, scale=call.scale, **window)
    dq, dk, dv = (result.transpose(1, 2) for result in results)
    return dq, dk, dv


implement(ATTENTION_WINDOW, _forward)
implement(ATTENTION_WINDOW_BACKWARD, _backward)
