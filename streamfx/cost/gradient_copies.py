"""Which gradients does autograd copy before it keeps them? Those that lie otherwise than what they are of.

accumulate_grad.h: obeys_layout_contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def largest_copied(inputs: Iterable[Any], gradients: Iterable[Any]) -> int:
    """Bytes of the largest gradient that is copied; copies are made one after the other, when all gradients are there."""
    pairs = zip(inputs, gradients, strict=False)
    tensors = [(value, own) for value, own in pairs if isinstance(value, Tensor) and isinstance(own, Tensor)]
    strided = ((value, own) for value, own in tensors if own.layout is torch.strided and own.shape == value.shape)
    return max((own.nbytes for value, own in strided if not lies_as(own, value)), default=0)


def lies_as(gradient: Tensor, value: Tensor) -> bool:
    if not _is_dense(value):
        return gradient.is_contiguous()
    strides = zip(gradient.shape, gradient.stride(), value.stride(), strict=True)
    return all(size == 1 or own == other for size, own, other in strides)


def _is_dense(value: Tensor) -> bool:
    """Whether each element has a place of its own, and no place is left between them."""
    places = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1):
        if stride != places:
            return False
        places *= size
    return True
