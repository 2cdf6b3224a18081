"""cuDNN's fused attention, which is faster than FlashAttention-2 on Hopper and Blackwell.

    queries see all keys      causal=False      the past of a chunk
    square causal mask        causal=True       its diagonal, or a full sequence

cuDNN aligns a causal mask at the first query and key, so a chunk with a past takes two calls, and `chunk_attention.py`
merges their results. This module never passes a mask to cuDNN: since PyTorch 2.11 a masked backward may return NaN
(pytorch#196678).

Source: aten/src/ATen/native/cudnn/MHA.cpp. Its cache of backward plans is keyed only by the sizes and strides of
queries, keys and values, while a plan also fixes the strides of the output, of its gradient and of the log-sum-exp.
Therefore `backward` always gives these three the same layout, and a call never gets a plan that was built for another
layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.kernels import kernel_selftest, layouts
from streamfx.kernels.attention_call import AttentionCall, Gradients, Result
from streamfx.kernels.device_kinds import device_kind
from streamfx.torch_private import FakeTensor

aten = torch.ops.aten

TYPES = {torch.float16, torch.bfloat16}  # sdp_utils.cpp: check_dtypes_low_precision
WIDTHS = range(8, 129, 8)  # sdp_utils.cpp: check_cudnn_tensor_shapes
LATENT_WIDTHS = (192, 128)  # also supported: widths of queries and values (cuDNN 9.11 on sm_90 and sm_100)
TILE_ROWS = 128  # rows per kernel tile; other lengths were wrong before cuDNN 9.15.1 (pytorch#169849)
MAX_ELEMENTS = 1 << 31  # elements of a tensor: the kernels compute offsets in 32 bits
TEST_CASES = ((TILE_ROWS, False), (TILE_ROWS, True), (3 * TILE_ROWS, False))  # number of keys, and whether the mask is causal


def supports(call: AttentionCall) -> bool:
    """Return whether cuDNN supports this call: without a bias, and without a mask or with a square causal one."""
    is_known = call.causal is False or (call.causal is True and call.query.shape[2] == call.key.shape[2])
    return is_known and call.bias is None and supports_past_and_diagonal(call)


def supports_past_and_diagonal(call: AttentionCall) -> bool:
    """Return whether cuDNN supports both calls of a chunk: the past (all keys before the first query) and the diagonal.

    Dtype, lengths, head widths and device must be supported, and the device's kernels must pass a test on known values.
    """
    query, key, value = call[:3]
    if query.dtype not in TYPES or (call.scale is not None and call.scale <= 0):
        return False
    if query.shape[2] % TILE_ROWS or key.shape[2] % TILE_ROWS or not key.shape[2]:
        return False
    widths = query.shape[3], value.shape[3]
    if widths != LATENT_WIDTHS and not all(width in WIDTHS for width in widths):
        return False
    if max(query.numel(), key.numel(), value.numel(), query.numel() // query.shape[3] * value.shape[3]) >= MAX_ELEMENTS:
        return False
    return _is_preferred(query.device) and (
        isinstance(query, FakeTensor) or matches_reference(query.device, query.dtype, *widths)
    )


def _is_preferred(device: torch.device) -> bool:
    """Return whether PyTorch would choose cuDNN first: False if the user disabled it, or activated FlashAttention-3.

    sdp_utils.cpp: check_prefer_cudnn_attention, check_runtime_disabled_cudnn, check_cudnn_deterministic.
    """
    if not device_kind(device).has_cudnn or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return not torch.are_deterministic_algorithms_enabled() and torch.nn.attention.current_flash_attention_impl() is None


@kernel_selftest.selftest("cuDNN's attention")
def matches_reference(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Return whether the device's kernels match plain operators, with and without a causal mask."""
    return all(
        kernel_selftest.matches_reference(
            forward,
            backward,
            causal,
            kernel_selftest.AttentionSizes(device, dtype, (4, TILE_ROWS), (2, keys), width, value_width),
        )
        for keys, causal in TEST_CASES
    )


def forward(call: AttentionCall) -> Result:
    """Return the output and log-sum-exp. The operands must have the layout of `cuda_attention.to_kernel_layout`."""
    query, key, value, _, causal, scale = call
    results = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, bool(causal), False, scale=scale)
    return results[0], results[1].reshape(query.shape[:3])


def backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv)."""
    query, key, value, _, causal, scale = call
    gradient, out, lse = _packed(gradient), _packed(out), lse.contiguous().unsqueeze(-1)
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    ends = (None, None, query.shape[2], key.shape[2])
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        gradient, _with_unique_stride(query), key, value, out, lse, seed, offset, None, *ends, 0.0, bool(causal), scale=scale
    )
    return dq, dk, dv


def _packed(tensor: Tensor) -> Tensor:
    """Return heads [b h m e] with the memory layout that `backward` always passes: contiguous as [b m h e], and aligned."""
    return layouts.align(tensor.transpose(1, 2).contiguous()).transpose(1, 2)


def _with_unique_stride(query: Tensor) -> Tensor:
    """Return the queries; for a batch of one item, with a batch stride that no dense tensor has.

    The stride of a dimension of size 1 is never used, but it is part of the key of cuDNN's plan cache. A plan that
    the user's own calls built for an output in another layout therefore never matches ours.
    """
    if query.shape[0] != 1:
        return query
    strides = (2 * query.numel(), *query.stride()[1:])
    return query.as_strided(query.shape, strides)
