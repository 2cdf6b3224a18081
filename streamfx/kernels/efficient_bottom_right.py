"""Memory-efficient attention whose causal mask, or window, ends at the last row and key: one call for the past and the diagonal.

It is for what flash attention does not take: cards before the A100, single precision, wide heads. In PyTorch's sources, under
aten/src/ATen/native/transformers/cuda: mem_eff_attention/kernel_forward.h and kernel_backward.h have CausalFromBottomRight
and windows; attention.cu: _efficient_attention_forward takes heads as [b m h d]. No result was seen by us, so a device's kernels
are tried once on numbers that are known, and where they refuse or differ the past and the diagonal are two calls, and a window is
a bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamfx.kernels import cuda_attention, kernel_selftest, layouts
from streamfx.kernels.plain_attention import BottomRightCausal
from streamfx.torch_private import FakeTensor

aten = torch.ops.aten
BOTTOM_RIGHT = 2  # kernel_forward.h: CustomMaskType
ROWS, KEYS = (2, 150), (2, 152)  # heads and rows that are tried


def takes(query: Tensor, scale: float | None, last: BottomRightCausal) -> bool:
    """Whether these are one call."""
    if scale is not None and scale <= 0:
        return False  # kernel_forward.h: iterative_softmax seeks the greatest score before scores are scaled
    width = query.shape[3] + -query.shape[3] % layouts.ALIGNED
    return isinstance(query, FakeTensor) or hides(query.device, query.dtype, width, last.left is not None)


@kernel_selftest.isolated("memory-efficient attention that ends at the last row")
def hides(device: torch.device, dtype: torch.dtype, width: int, has_window: bool) -> bool:
    """Whether the device's kernel hides what is behind a row, or outside of a window: seen on more rows than it takes at once, of
    which some see few keys, so that one more would be seen."""
    left = 3 if has_window else KEYS[1]
    return kernel_selftest.agree(
        lambda q, k, v: forward(q, k, v, left, None),
        lambda g, q, k, v, out, lse: backward(g, q, k, v, out, lse, left, None),
        BottomRightCausal(left),
        kernel_selftest.AttentionSizes(device, dtype, ROWS, KEYS, width),
    )


def forward(query: Tensor, key: Tensor, value: Tensor, left: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Result [b h m e] and log-sum-exp [b h m] of operands that are readable, of as many heads."""
    by_rows = (item.transpose(1, 2) for item in (query, key, value))
    ends = (None, None, None, None)
    how = {"scale": scale, **_window(left, key)}
    out, lse, *_ = aten._efficient_attention_forward(*by_rows, None, *ends, 0.0, BOTTOM_RIGHT, True, **how)
    return out.transpose(1, 2), lse[:, :, : query.shape[2]].contiguous()


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, left: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    out, lse = layouts.by_rows(out), cuda_attention.readable_lse(lse)  # kernel_backward.h: o_strideM()
    gradient, query, key, value, out = (item.transpose(1, 2) for item in (gradient, query, key, value, out))
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    ends, how = (None, None, query.shape[1], key.shape[1]), {"scale": scale, **_window(left, key.transpose(1, 2))}
    made = aten._efficient_attention_backward(
        gradient, query, key, value, None, out, *ends, lse, 0.0, seed, offset, BOTTOM_RIGHT, False, **how
    )
    dq, dk, dv = (item.transpose(1, 2) for item in made[:3])
    return dq, dk, dv


def _window(left: int, key: Tensor) -> dict[str, Any]:
    """The kernels count the row's own key; all keys are no window."""
    return {"window_size": left + 1} if left + 1 < key.shape[2] else {}
