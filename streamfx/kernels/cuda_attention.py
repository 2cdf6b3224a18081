"""The fused attention kernels of CUDA, called within the constraints of each kernel.

cuDNN runs the call if it is the fastest (`cuda_cudnn.py`). Otherwise flash attention does, and memory-efficient
attention runs single precision and biases. Kernels check few of their assumptions, so a comment at each call says
which layout the kernel reads and names the place in PyTorch's sources (under aten/src/ATen/native/transformers/cuda)
that shows it. `tests/support/cuda_kernels.py` checks the same constraints on the kernel's side.

Sizes: b batch, h query heads, g heads of keys and values, m queries, n keys, d and e widths of a head. `bias` is added to
the scores, `causal` is one of `plain_attention.Causal`, `scale` multiplies the scores (None: 1 / sqrt(d)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import cuda_cudnn, layouts
from streamfx.kernels.cuda_blocks import TileSizes, gradients
from streamfx.kernels.device_kinds import device_kind
from streamfx.kernels.plain_attention import Causal, for_all_heads, for_groups

aten = torch.ops.aten

FLASH_TYPES = {torch.float16, torch.bfloat16}  # flash_api.cpp: mha_fwd
TYPES = {torch.float32, torch.float16, torch.bfloat16}  # gemm_kernel_utils.h: DISPATCH_TYPES
BIAS_ALIGNMENT = 16  # elements: attention.cpp: pad_bias
MAX_EXPANDED_BYTES = 1 << 30  # bytes: limit for the gradients of keys and values, expanded to all query heads
MAX_ACCUMULATOR_BYTES = 1 << 29  # bytes: limit for the accumulator of the queries' gradients
LSE_ALIGNMENT = 32  # rows: kernel_forward.h: kAlignLSE; the backward reads this many rows at once


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [b h m e] and log-sum-exp [b h m] of queries [b h m d], keys [b g n d] and values [b g n e]."""
    query, key, value, scale = to_kernel_layout(query, key, value, scale)
    if cuda_cudnn.supports(query, key, value, bias, causal, scale):
        return cuda_cudnn.forward(query, key, value, causal, scale)
    if is_flash(query, key, value, bias, causal, scale):
        result = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, bool(causal), False, scale=scale)
        return result[0], result[1]
    key, value = (for_all_heads(heads, query) for heads in (key, value))  # attention.cu: requires equal head counts
    bias = _padded_bias(bias, query, key)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, bool(causal), scale=scale)
    return out, lse[:, :, : query.shape[2]]


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
    """Return (dq, dk, dv): the gradients of queries, keys and values.

    `gradient` is the gradient of the output; `out` and `lse` are the results of `forward`.
    """
    query, key, value, scale = to_kernel_layout(query, key, value, scale)
    gradient, out = results_to_kernel_layout(gradient, out, query)
    if cuda_cudnn.supports(query, key, value, bias, causal, scale):
        return gradients(cuda_cudnn.backward, (gradient, query, key, value, out, lse), causal, scale, max_tile)
    if is_flash(query, key, value, bias, causal, scale):
        return _flash_backward(gradient, query, key, value, out, lse, causal, scale)
    return _efficient_backward(gradient, query, key, value, out, lse, bias, causal, scale)


def has_kernels(query: Tensor) -> bool:
    """Return whether the device's kernels support the query's dtype (sdp_utils.cpp: less_than_sm80_mem_efficient_dtypes)."""
    return query.dtype != torch.bfloat16 or device_kind(query.device).capability[0] >= 8


def is_flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None) -> bool:
    """Return whether flash attention supports this call, by the rules of `sdp_utils.cpp: use_flash_attention`."""
    if causal is True and query.shape[2] != key.shape[2]:
        return False  # mask.h: aligned at the last query and key; all other kernels align it at the first
    return bias is None and flash_supports(query, value, scale)


def flash_supports(query: Tensor, value: Tensor, scale: float | None) -> bool:
    """Return whether flash attention supports these dtypes, head widths and scale, on this device, without a bias.

    Its causal mask is aligned at the bottom right: the last query sees all keys.
    """
    if query.dtype not in FLASH_TYPES or (scale is not None and scale <= 0):
        return False  # softmax.h: the maximum is taken before scores are scaled
    width, value_width = (heads.shape[-1] + -heads.shape[-1] % layouts.ALIGNMENT for heads in (query, value))
    return width == value_width <= flash_width(query.device)


def flash_width(device: torch.device) -> int:
    """Return the widest head dimension for which flash attention has a backward, or 0 if it cannot run on the device."""
    kind = device_kind(device)
    major, minor = kind.capability
    if not kind.has_flash or major < 8:  # sdp_utils.cpp: check_flash_attention_hardware_support
        return 0
    is_small = major == 12 or (major == 8 and minor >= 6)  # check_requires_grad_and_head_dim_gt192_constraints
    return 192 if is_small else 256  # flash_api.cpp: mha_fwd


def to_kernel_layout(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Pad heads to the width that the kernels load (sdp_utils.cpp: minimum_gemm_alignment), and align their addresses.

    Return (query, key, value, scale). Zero columns do not change the scores, but they change the default scale,
    because it depends on the width; so padded heads get the scale of their original width.
    """
    if query.shape[-1] % layouts.ALIGNMENT:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (layouts.align(layouts.padded_last(operand, layouts.ALIGNMENT)) for operand in (query, key, value))
    return query, key, value, scale


def results_to_kernel_layout(gradient: Tensor, out: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Convert the output and its gradient to the layout and dtype that the backward kernels read; return (gradient, out).

    attention_backward.cu makes gradients contiguous, but misreads them if their dtype differs from the query's.
    """
    gradient, out = (layouts.padded_last(heads.to(query.dtype), layouts.ALIGNMENT) for heads in (gradient, out))
    return layouts.align(gradient), out


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by flash attention, in tiles if its workspace would be large."""
    out, lse = layouts.align(out), lse.contiguous()  # flash_api.cpp: set_params_fprop reads its pointer and ignores its strides
    return gradients(_flash_tile, (gradient, query, key, value, out, lse), causal, scale, max_tile)


def _flash_tile(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run flash attention's backward once, on a tile (a range of queries and of keys); return (dq, dk, dv)."""
    ends = (None, None, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse, *ends, 0.0, bool(causal), *no_dropout(query.device), scale=scale
    )


def no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the RNG state (seed, offset) that flash attention's backward takes as arguments: zeros without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)


def max_tile(query: Tensor, key: Tensor) -> TileSizes:
    """Return the maximum number of queries, and of keys, of one backward call, so that its workspace stays small.

    Called for operands [b h m d] and [b g n d]. If the queries need several calls, keys are cut at least as finely.
    """
    rows, keys = _rows_at_once(query), keys_at_once(query, key)
    return TileSizes(rows, keys if query.shape[2] <= rows else min(keys, rows))


def _rows_at_once(query: Tensor) -> int:
    """Return the number of queries per call that keeps the kernel's float32 dq within MAX_ACCUMULATOR_BYTES; at least 1."""
    batch, heads, _, width = query.shape
    row_bytes = batch * heads * (1 + width) * 4  # flash_api.cpp: mha_bwd: softmax_d, dq_accum; cuDNN allocates the same
    return max(_in_tiles(MAX_ACCUMULATOR_BYTES // row_bytes), 1)


def keys_at_once(query: Tensor, key: Tensor) -> int:
    """Return the number of keys per call that keeps the kernel's dk and dv, expanded to all query heads, small.

    The limit is MAX_EXPANDED_BYTES, but the result is at least the number of queries of a call. With one key head for each
    query head the kernel expands nothing: all keys.
    """
    batch, heads, rows, width = query.shape
    if heads == key.shape[1]:
        return key.shape[2]
    row_bytes = 2 * batch * heads * width * query.element_size()  # flash_api.cpp: mha_bwd: dk_expanded, dv_expanded
    return max(_in_tiles(MAX_EXPANDED_BYTES // row_bytes), min(rows, _rows_at_once(query)))


def _in_tiles(size: int) -> int:
    """Round a number of rows down to a multiple of cuDNN's tile, unless it is less than one tile."""
    return size // cuda_cudnn.TILE_ROWS * cuda_cudnn.TILE_ROWS or size


def _efficient_backward(
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
    """Return (dq, dk, dv) by memory-efficient attention, with keys and values repeated for all heads."""
    groups = key.shape[1]
    key, value = (for_all_heads(heads, query) for heads in (key, value))
    bias, lse = _padded_bias(bias, query, key), padded_lse(lse)
    out = layouts.rows_contiguous(out)  # kernel_backward.h: o_strideM() is heads * width, whatever the strides are
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    needs_gradient = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, bias, out, lse, seed, offset, 0.0, needs_gradient, bool(causal), scale=scale
    )
    return dq, for_groups(dk, groups), for_groups(dv, groups)


def _padded_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expand a bias to all heads (attention_backward.cu) and align its rows (kernel_backward.h: check_supported).

    The kernel reads 16 bytes at once (MatmulQK: BiasLoader), so the elements past the end of a row must be valid:
    they are zero.
    """
    if bias is None:
        return None
    keys = key.shape[2]
    bias = bias.to(query.dtype).expand(*bias.shape[:-1], keys)
    bias = layouts.align(layouts.padded_last(bias, BIAS_ALIGNMENT))[..., :keys]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def padded_lse(lse: Tensor) -> Tensor:
    """Pad a log-sum-exp to the rows that the kernel reads past its end (mma_from_smem.h: accumApplyLSEToSmem).

    It is padded with infinity, so that the weights of these rows are zero.
    """
    return layouts.align(F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=float("inf")))
