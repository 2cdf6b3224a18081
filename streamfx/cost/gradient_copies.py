"""The gradients that autograd copies before it stores them: if their strides differ from the strides of their input.

accumulate_grad.h: obeys_layout_contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def largest_copied(inputs: Iterable[Any], gradients: Iterable[Any]) -> int:
    """Return the bytes of the largest gradient that is copied. Gradients are copied one by one, after all of them exist."""
    pairs = zip(inputs, gradients, strict=False)
    tensors = [(value, gradient) for value, gradient in pairs if isinstance(value, Tensor) and isinstance(gradient, Tensor)]
    strided = (
        (value, gradient) for value, gradient in tensors if gradient.layout is torch.strided and gradient.shape == value.shape
    )
    return max((gradient.nbytes for value, gradient in strided if not lies_as(gradient, value)), default=0)


def lies_as(gradient: Tensor, value: Tensor) -> bool:
    """Return whether a gradient is stored as it is: strides equal to those of a dense value, or else contiguous."""
    if not _is_dense(value):
        return gradient.is_contiguous()
    strides = zip(gradient.shape, gradient.stride(), value.stride(), strict=True)
    return all(size == 1 or gradient_stride == value_stride for size, gradient_stride, value_stride in strides)


def _is_dense(value: Tensor) -> bool:
    """Return whether the elements fill memory without overlaps and without gaps."""
    expected_stride = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1):
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True
