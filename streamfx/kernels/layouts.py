"""How a kernel wants a tensor to lie in memory: kernels take a pointer and some of the strides, and believe the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.torch_private import FakeTensor

ALIGNED = 8  # elements: what a kernel reads at once, 16 bytes of a half type


def dense(tensor: Tensor) -> Tensor:
    """With elements of the last dimension side by side: kernels take no stride for them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """With each row side by side, beginning at a multiple of `ALIGNED` elements."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_aligned(tensor: Tensor) -> bool:
    *outer, last = tensor.stride()
    begins = _address(tensor) % (ALIGNED * tensor.element_size()) == 0
    return begins and last == 1 and not any(stride % ALIGNED for stride in outer)


def _address(tensor: Tensor) -> int:
    """Where a tensor begins; a traced one in memory that begins where an allocator would."""
    if isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def by_rows(tensor: Tensor) -> Tensor:
    """Heads [b h m e] that lie in memory as [b m h e], one row's heads side by side."""
    rows = tensor.transpose(1, 2)
    heads, width = rows.shape[2:]
    if is_aligned(tensor) and tensor.stride(2) == heads * width:
        return tensor
    return rows.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def widened(tensor: Tensor, multiple: int) -> Tensor:
    """With zeros behind the last dimension, up to a multiple."""
    short = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, short)) if short else tensor
