"""Memory-efficient attention with a bottom-right causal mask or window: one call for the past and the diagonal.

It runs the operands that flash attention does not support: on GPUs before the A100, in single precision, with wide
heads. PyTorch's sources under aten/src/ATen/native/transformers/cuda: mem_eff_attention/kernel_forward.h and
kernel_backward.h have CausalFromBottomRight and windows; attention.cu: _efficient_attention_forward takes heads as
[b m h d]. Each device's kernels are tested once on known values. If they raise an error or differ, the past and the
diagonal are two calls, and a window becomes a bias.

Query i sees keys i + n - m - left .. i + n - m: `left` keys before its own key, and the last query's own key is the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamfx.kernels import cuda_attention, kernel_selftest, layouts
from streamfx.kernels.attention_call import AttentionCall, BottomRightCausal, Gradients, Result
from streamfx.torch_private import FakeTensor

aten = torch.ops.aten
CAUSAL_FROM_BOTTOM_RIGHT = 2  # kernel_forward.h: CustomMaskType
ROWS, KEYS = (2, 150), (2, 152)  # heads and rows of the test


def supports(call: AttentionCall, bottom_right: BottomRightCausal) -> bool:
    """Return whether one call computes these queries under this mask: the keys before the chunk and the square diagonal."""
    query = call.query
    if call.scale is not None and call.scale <= 0:
        return False  # kernel_forward.h: iterative_softmax takes the maximum before scores are scaled
    width = query.shape[3] + -query.shape[3] % layouts.ALIGNMENT
    return isinstance(query, FakeTensor) or masks_correctly(query.device, query.dtype, width, bottom_right.left is not None)


@kernel_selftest.selftest("memory-efficient attention that ends at the last row")
def masks_correctly(device: torch.device, dtype: torch.dtype, width: int, has_window: bool) -> bool:
    """Return whether the device's kernel hides the keys after a query, or outside its window, at this head width.

    The test has more rows than one kernel tile, and some rows see only a few keys, so that a single extra key would
    be noticed.
    """
    left = 3 if has_window else KEYS[1]
    return kernel_selftest.matches_reference(
        lambda call: forward(call, left),
        lambda call, gradient, out, lse: backward(call, left, gradient, out, lse),
        BottomRightCausal(left),
        kernel_selftest.AttentionSizes(device, dtype, ROWS, KEYS, width),
    )


def forward(call: AttentionCall, left: int) -> Result:
    """Return the output and log-sum-exp.

    The operands have equal head counts, and the layout of `cuda_attention.to_kernel_layout`.
    """
    by_rows = (operand.transpose(1, 2) for operand in call[:3])
    ends = (None, None, None, None)
    options = {"scale": call.scale, **_window(left, call.key)}
    out, lse, *_ = aten._efficient_attention_forward(*by_rows, None, *ends, 0.0, CAUSAL_FROM_BOTTOM_RIGHT, True, **options)
    return out.transpose(1, 2), lse[:, :, : call.query.shape[2]].contiguous()


def backward(call: AttentionCall, left: int, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv)."""
    out, lse = layouts.rows_contiguous(out), cuda_attention.padded_lse(lse)  # kernel_backward.h: o_strideM()
    gradient, query, key, value, out = (operand.transpose(1, 2) for operand in (gradient, *call[:3], out))
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    ends, options = (None, None, query.shape[1], key.shape[1]), {"scale": call.scale, **_window(left, call.key)}
    results = aten._efficient_attention_backward(
        gradient, query, key, value, None, out, *ends, lse, 0.0, seed, offset, CAUSAL_FROM_BOTTOM_RIGHT, False, **options
    )
    dq, dk, dv = (result.transpose(1, 2) for result in results[:3])
    return dq, dk, dv


def _window(left: int, key: Tensor) -> dict[str, Any]:
    """Return the kernel's keyword argument for a window of `left` keys before a query's own key; {} if it has all keys [b h n d].

    The kernel's `window_size` counts the query's own key.
    """
    return {"window_size": left + 1} if left + 1 < key.shape[2] else {}
