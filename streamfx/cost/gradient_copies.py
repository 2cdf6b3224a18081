"""The gradients that autograd copies before it stores them: if their strides differ from the strides of their input.

accumulate_grad.h: obeys_layout_contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def largest_copied_bytes(inputs: Iterable[Any], gradients: Iterable[Any]) -> int:
    """Return the bytes of the largest gradient that is copied. Gradients are copied one by one, after all of them exist."""
    pairs = zip(inputs, gradients, strict=False)
    tensors = [
        (input_value, gradient)
        for input_value, gradient in pairs
        if isinstance(input_value, Tensor) and isinstance(gradient, Tensor)
    ]
    strided = (
        (input_value, gradient)
        for input_value, gradient in tensors
        if gradient.layout is torch.strided and gradient.shape == input_value.shape
    )
    return max((gradient.nbytes for input_value, gradient in strided if not needs_no_copy(gradient, input_value)), default=0)


def needs_no_copy(gradient: Tensor, input_value: Tensor) -> bool:
    """Return whether autograd stores a gradient without a copy: strides of a dense input, or else contiguous."""
    if not _is_dense(input_value):
        return gradient.is_contiguous()
    strides = zip(gradient.shape, gradient.stride(), input_value.stride(), strict=True)
    return all(size == 1 or gradient_stride == value_stride for size, gradient_stride, value_stride in strides)


def _is_dense(value: Tensor) -> bool:
    """Return whether the elements fill memory without overlaps and without gaps."""
    expected_stride = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1):
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True
