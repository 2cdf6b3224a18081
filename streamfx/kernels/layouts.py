"""Memory layouts that kernels require: a kernel takes a pointer and some of the strides, and assumes the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.torch_private import FakeTensor

ALIGNMENT = 8  # elements: a kernel reads this many elements at once, 16 bytes of a half dtype


def dense_last(tensor: Tensor) -> Tensor:
    """Return the tensor with a last dimension of stride 1, because kernels take no stride for it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def align(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its layout is not as `is_aligned` requires."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether the last stride is 1, and the address and all other strides are multiples of the alignment."""
    *outer, last = tensor.stride()
    is_start_aligned = _address(tensor) % (ALIGNMENT * tensor.element_size()) == 0
    return is_start_aligned and last == 1 and not any(stride % ALIGNMENT for stride in outer)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's first element; for a fake tensor, as if its storage began at address 0."""
    if isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def rows_contiguous(tensor: Tensor) -> Tensor:
    """Return heads [b h m e] (batch, heads, rows, width) whose memory is contiguous as [b m h e]; a copy only if needed."""
    rows = tensor.transpose(1, 2)
    heads, width = rows.shape[2:]
    if is_aligned(tensor) and tensor.stride(2) == heads * width:
        return tensor
    return rows.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def padded_last(tensor: Tensor, multiple: int) -> Tensor:
    """Return the tensor with the last dimension padded with zeros to a multiple of `multiple`."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor
