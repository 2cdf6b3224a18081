"""Run `streamfx::relative_shift` and its backward (`dialect/rel_shift.py`): views with strides, copied."""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD, with_columns


def shift_rows(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Return the scores indexed by key: the operator's implementation."""
    return _read_elements(_rows_contiguous(x, dim), dim, first, columns).clone(memory_format=torch.contiguous_format)


def shift_rows_backward(gradient: Tensor, dim: int, first: int, width: int) -> Tensor:
    """Return the gradient of x: zeros, with `gradient` written where `shift_rows` read."""
    result = gradient.new_zeros(with_columns(gradient, dim, width))
    _read_elements(result, dim, first, gradient.shape[dim + 1]).copy_(gradient)
    return result


def _rows_contiguous(x: Tensor, dim: int) -> Tensor:
    """Return x with rows contiguous in memory."""
    return x if x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1) else x.contiguous()


def _read_elements(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Return the elements of x that `shift_rows` reads, as a view without overlapping elements."""
    rows, width, step = x.shape[dim], x.shape[dim + 1], x.stride(dim + 1)
    shape, strides = with_columns(x, dim, columns), list(x.stride())
    if 0 in shape:
        return x.new_empty(shape)
    last = first + (rows - 1) * (width - 1) + columns
    if first < 0 or last > rows * width or (columns >= width and rows > 1):
        raise ValueError(f"a shift of {rows} rows of {width} columns has no {columns} columns from index {first} on")
    strides[dim] -= step
    return x.as_strided(shape, strides, x.storage_offset() + first * step)


implement(RELATIVE_SHIFT, shift_rows)
implement(RELATIVE_SHIFT_BACKWARD, shift_rows_backward)
