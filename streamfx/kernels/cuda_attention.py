"""The fused attention kernels of CUDA, called in the way that they can be called.

cuDNN where it is the fastest (`cuda_cudnn.py`), else flash attention, and memory-efficient attention for single precision and
biases. Kernels check little of what
they assume, so what each reads, and how, is written down here beside the name of the place in PyTorch's sources (under
aten/src/ATen/native/transformers/cuda) that says so. `tests/support/cuda_kernels.py` holds the same from the other side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import cuda_cudnn, layouts
from streamfx.kernels.cuda_blocks import TileSizes, gradients
from streamfx.kernels.device_kinds import kind_of
from streamfx.kernels.plain_attention import Causal, for_all_heads, for_groups

aten = torch.ops.aten

FLASH_TYPES = {torch.float16, torch.bfloat16}  # flash_api.cpp: mha_fwd
TYPES = {torch.float32, torch.float16, torch.bfloat16}  # gemm_kernel_utils.h: DISPATCH_TYPES
BIAS_ALIGNMENT = 16  # elements: attention.cpp: pad_bias
EXPANDED = 1 << 30  # bytes: so much may the gradients of keys and values take, for all query heads that share them
ACCUMULATED = 1 << 29  # bytes: and so much the sums of the gradients of queries
LSE_ALIGNMENT = 32  # rows: kernel_forward.h: kAlignLSE; the backward reads so many at once


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Result [b h m e] and log-sum-exp [b h m]."""
    query, key, value, scale = readable(query, key, value, scale)
    if cuda_cudnn.takes(query, key, value, bias, causal, scale):
        return cuda_cudnn.forward(query, key, value, causal, scale)
    if is_flash(query, key, value, bias, causal, scale):
        made = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, bool(causal), False, scale=scale)
        return made[0], made[1]
    key, value = (for_all_heads(item, query) for item in (key, value))  # attention.cu: heads are as many
    bias = _readable_bias(bias, query, key)
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
    """Gradients of queries, keys and values."""
    query, key, value, scale = readable(query, key, value, scale)
    gradient, out = readable_results(gradient, out, query)
    if cuda_cudnn.takes(query, key, value, bias, causal, scale):
        return gradients(cuda_cudnn.backward, (gradient, query, key, value, out, lse), causal, scale, sizes)
    if is_flash(query, key, value, bias, causal, scale):
        return _flash_backward(gradient, query, key, value, out, lse, causal, scale)
    return _efficient_backward(gradient, query, key, value, out, lse, bias, causal, scale)


def are_there(query: Tensor) -> bool:
    """Whether the device has kernels for numbers of this type (sdp_utils.cpp: less_than_sm80_mem_efficient_dtypes)."""
    return query.dtype != torch.bfloat16 or kind_of(query.device).capability[0] >= 8


def is_flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None) -> bool:
    """Whether flash attention takes these, as `sdp_utils.cpp: use_flash_attention` has it."""
    if causal is True and query.shape[2] != key.shape[2]:
        return False  # mask.h: aligns at the last row and key, where all others align at the first
    return bias is None and takes_flash(query, value, scale)


def takes_flash(query: Tensor, value: Tensor, scale: float | None) -> bool:
    """Whether flash attention takes these without a bias: its causal mask ends at the last row and key."""
    if query.dtype not in FLASH_TYPES or (scale is not None and scale <= 0):
        return False  # softmax.h: the greatest score is sought before scores are scaled
    width, value_width = (item.shape[-1] + -item.shape[-1] % layouts.ALIGNED for item in (query, value))
    return width == value_width <= flash_width(query.device)


def flash_width(device: torch.device) -> int:
    """The widest head that flash attention can be trained with; 0 where it cannot run."""
    kind = kind_of(device)
    major, minor = kind.capability
    if not kind.has_flash or major < 8:  # sdp_utils.cpp: check_flash_attention_hardware_support
        return 0
    is_small = major == 12 or (major == 8 and minor >= 6)  # check_requires_grad_and_head_dim_gt192_constraints
    return 192 if is_small else 256  # flash_api.cpp: mha_fwd


def readable(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Heads of a width that the kernels load whole (sdp_utils.cpp: minimum_gemm_alignment), and where they can load them.

    Columns of zeros change no score, only the scale that a width stands for.
    """
    if query.shape[-1] % layouts.ALIGNED:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (layouts.aligned(layouts.widened(item, layouts.ALIGNED)) for item in (query, key, value))
    return query, key, value, scale


def readable_results(gradient: Tensor, out: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """As the backward reads them (attention_backward.cu: gradients are made contiguous there; of another type, misread)."""
    gradient, out = (layouts.widened(item.to(query.dtype), layouts.ALIGNED) for item in (gradient, out))
    return layouts.aligned(gradient), out


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
    out, lse = layouts.aligned(out), lse.contiguous()  # flash_api.cpp: set_params_fprop takes its pointer and none of its strides
    return gradients(_flash_block, (gradient, query, key, value, out, lse), causal, scale, sizes)


def _flash_block(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    ends = (None, None, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse, *ends, 0.0, bool(causal), *no_dropout(query.device), scale=scale
    )


def no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The states of a generator that flash attention's backward is handed where nothing is dropped."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)


def sizes(query: Tensor, key: Tensor) -> TileSizes:
    """How many rows and keys a call of the backward takes."""
    rows, keys = _rows_at_once(query), keys_at_once(query, key)
    return TileSizes(rows, keys if query.shape[2] <= rows else min(keys, rows))


def _rows_at_once(query: Tensor) -> int:
    batch, heads, _, width = query.shape
    row_bytes = batch * heads * (1 + width) * 4  # flash_api.cpp: mha_bwd: softmax_d, dq_accum; cuDNN makes the same
    return max(_in_tiles(ACCUMULATED // row_bytes), 1)


def keys_at_once(query: Tensor, key: Tensor) -> int:
    """So many keys, or as many as there are rows more, take little memory for the gradients of all query heads."""
    batch, heads, rows, width = query.shape
    if heads == key.shape[1]:
        return key.shape[2]
    row_bytes = 2 * batch * heads * width * query.element_size()  # flash_api.cpp: mha_bwd: dk_expanded, dv_expanded
    return max(_in_tiles(EXPANDED // row_bytes), min(rows, _rows_at_once(query)))


def _in_tiles(size: int) -> int:
    return size // cuda_cudnn.MULTIPLE * cuda_cudnn.MULTIPLE or size


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
    groups = key.shape[1]
    key, value = (for_all_heads(item, query) for item in (key, value))
    bias, lse = _readable_bias(bias, query, key), readable_lse(lse)
    out = layouts.by_rows(out)  # kernel_backward.h: o_strideM() is heads * width, whatever the strides are
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, bias, out, lse, seed, offset, 0.0, wanted, bool(causal), scale=scale
    )
    return dq, for_groups(dk, groups), for_groups(dv, groups)


def _readable_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A bias for all heads (attention_backward.cu) whose rows begin at aligned addresses (kernel_backward.h: check_supported).

    What is loaded with a row's last elements has to be a number (MatmulQK: BiasLoader reads 16 bytes at once): zeros.
    """
    if bias is None:
        return None
    keys = key.shape[2]
    bias = bias.to(query.dtype).expand(*bias.shape[:-1], keys)
    bias = layouts.aligned(layouts.widened(bias, BIAS_ALIGNMENT))[..., :keys]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def readable_lse(lse: Tensor) -> Tensor:
    """With the rows that are read beyond the last (mma_from_smem.h: accumApplyLSEToSmem): they weigh nothing."""
    return layouts.aligned(F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=float("inf")))
