"""The fused attention kernels of CUDA, called within the constraints of each kernel.

cuDNN runs the call if it is the fastest (`cuda_cudnn.py`). Otherwise flash attention does, and memory-efficient
attention runs single precision and biases. Kernels check few of their assumptions, so a comment at each call says
which layout the kernel reads and names the place in PyTorch's sources (under aten/src/ATen/native/transformers/cuda)
that shows it. `tests/support/cuda_kernels.py` checks the same constraints on the kernel's side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import cuda_cudnn, layouts
from streamfx.kernels.attention_call import AttentionCall, Gradients, Result, for_all_heads, for_groups
from streamfx.kernels.cuda_blocks import TileSizes, gradients
from streamfx.kernels.device_kinds import device_kind

aten = torch.ops.aten

FLASH_TYPES = {torch.float16, torch.bfloat16}  # flash_api.cpp: mha_fwd
TYPES = {torch.float32, torch.float16, torch.bfloat16}  # gemm_kernel_utils.h: DISPATCH_TYPES
BIAS_ALIGNMENT = 16  # elements: attention.cpp: pad_bias
MAX_EXPANDED_BYTES = 1 << 30  # bytes: limit for the gradients of keys and values, expanded to all query heads
MAX_ACCUMULATOR_BYTES = 1 << 29  # bytes: limit for the accumulator of the queries' gradients
LSE_ALIGNMENT = 32  # rows: kernel_forward.h: kAlignLSE; the backward reads this many rows at once


def forward(call: AttentionCall) -> Result:
    """Return the output and the log-sum-exp."""
    call = to_kernel_layout(call)
    if cuda_cudnn.supports(call):
        return cuda_cudnn.forward(call)
    if is_flash(call):
        query, key, value, _, causal, scale = call
        result = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, bool(causal), False, scale=scale)
        return result[0], result[1]
    call = for_all_heads(call)  # attention.cu: requires equal head counts
    query, key, value, _, causal, scale = call
    bias = _padded_bias(call)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, bool(causal), scale=scale)
    return out, lse[:, :, : query.shape[2]]


def backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv); by cuDNN or flash attention in tiles, if the workspace would be large."""
    call = to_kernel_layout(call)
    gradient, out = results_to_kernel_layout(gradient, out, call.query)
    if cuda_cudnn.supports(call):
        return gradients(cuda_cudnn.backward, call, (gradient, out, lse), max_tile)
    if is_flash(call):
        # flash_api.cpp: set_params_fprop reads the pointer of the log-sum-exp and ignores its strides
        return gradients(_flash_tile, call, (gradient, layouts.align(out), lse.contiguous()), max_tile)
    return _efficient_backward(call, gradient, out, lse)


def has_kernels(query: Tensor) -> bool:
    """Return whether the device's kernels support the query's dtype (sdp_utils.cpp: less_than_sm80_mem_efficient_dtypes)."""
    return query.dtype != torch.bfloat16 or device_kind(query.device).capability[0] >= 8


def is_flash(call: AttentionCall) -> bool:
    """Return whether flash attention supports this call, by the rules of `sdp_utils.cpp: use_flash_attention`."""
    if call.causal is True and call.query.shape[2] != call.key.shape[2]:
        return False  # mask.h: aligned at the last query and key; all other kernels align it at the first
    return call.bias is None and flash_supports(call)


def flash_supports(call: AttentionCall) -> bool:
    """Return whether flash attention supports these dtypes, head widths and scale, on this device, without a bias.

    Its causal mask is aligned at the bottom right: the last query sees all keys.
    """
    query, value, scale = call.query, call.value, call.scale
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


def to_kernel_layout(call: AttentionCall) -> AttentionCall:
    """Pad heads to the width that the kernels load (sdp_utils.cpp: minimum_gemm_alignment), and align their addresses.

    Zero columns do not change the scores, but they change the default scale, because it depends on the width; so padded
    heads get the scale of their original width.
    """
    width, scale = call.query.shape[-1], call.scale
    if width % layouts.ALIGNMENT:
        scale = width**-0.5 if scale is None else scale
    query, key, value = (layouts.align(layouts.padded_last(operand, layouts.ALIGNMENT)) for operand in call[:3])
    return call._replace(query=query, key=key, value=value, scale=scale)


def results_to_kernel_layout(gradient: Tensor, out: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Convert the output and its gradient to the layout and dtype that the backward kernels read; return (gradient, out).

    attention_backward.cu makes gradients contiguous, but misreads them if their dtype differs from the query's.
    """
    gradient, out = (layouts.padded_last(heads.to(query.dtype), layouts.ALIGNMENT) for heads in (gradient, out))
    return layouts.align(gradient), out


def _flash_tile(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Run flash attention's backward once, on a tile (a range of queries and of keys); return (dq, dk, dv)."""
    query, key, value, _, causal, scale = call
    ends = (None, None, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse, *ends, 0.0, bool(causal), *no_dropout(query.device), scale=scale
    )


def no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the RNG state (seed, offset) that flash attention's backward takes as arguments: zeros without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)


def max_tile(call: AttentionCall) -> TileSizes:
    """Return the maximum number of queries, and of keys, of one backward call, so that its workspace stays small.

    If the queries need several calls, keys are cut at least as finely.
    """
    rows, keys = _rows_at_once(call.query), keys_at_once(call.query, call.key)
    return TileSizes(rows, keys if call.query.shape[2] <= rows else min(keys, rows))


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


def _efficient_backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv) by memory-efficient attention, with keys and values repeated for all heads."""
    groups, call = call.key.shape[1], for_all_heads(call)
    query, key, value, _, causal, scale = call
    bias, lse = _padded_bias(call), padded_lse(lse)
    out = layouts.rows_contiguous(out)  # kernel_backward.h: o_strideM() is heads * width, whatever the strides are
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    needs_gradient = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, bias, out, lse, seed, offset, 0.0, needs_gradient, bool(causal), scale=scale
    )
    return dq, for_groups(dk, groups), for_groups(dv, groups)


def _padded_bias(call: AttentionCall) -> Tensor | None:
    """Expand the bias to all heads (attention_backward.cu) and align its rows (kernel_backward.h: check_supported).

    The kernel reads 16 bytes at once (MatmulQK: BiasLoader), so the elements past the end of a row must be valid:
    they are zero.
    """
    query, bias, keys = call.query, call.bias, call.key.shape[2]
    if bias is None:
        return None
    bias = bias.to(query.dtype).expand(*bias.shape[:-1], keys)
    bias = layouts.align(layouts.padded_last(bias, BIAS_ALIGNMENT))[..., :keys]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def padded_lse(lse: Tensor) -> Tensor:
    """Pad a log-sum-exp to the rows that the kernel reads past its end (mma_from_smem.h: accumApplyLSEToSmem).

    It is padded with infinity, so that the weights of these rows are zero.
    """
    return layouts.align(F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=float("inf")))
