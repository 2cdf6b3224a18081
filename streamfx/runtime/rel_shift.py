"""Run `streamfx::relative_shift` and its backward (`dialect/rel_shift.py`), which convert scores indexed by distance to key.

    x [.. rows width ..] -> y [.. rows columns ..]        y[i, j] = x[i, first - i + j]

Rows and columns are the dimensions `dim` and `dim + 1`. In memory, y[i + 1] starts width - 1 elements after y[i], so y is a view
of x with another stride, copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD, with_columns


def shift_rows(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Implement `streamfx::relative_shift`: return y, a contiguous copy of the elements of x that it reads."""
    return _read_elements(_rows_contiguous(x, dim), dim, first, columns).clone(memory_format=torch.contiguous_format)


def shift_rows_backward(gradient: Tensor, dim: int, first: int, width: int) -> Tensor:
    """Implement `relative_shift_backward`: return the gradient of x, zeros with `gradient` (of y) written where y was read."""
    result = gradient.new_zeros(with_columns(gradient, dim, width))
    _read_elements(result, dim, first, gradient.shape[dim + 1]).copy_(gradient)
    return result


def _rows_contiguous(x: Tensor, dim: int) -> Tensor:
    """Return x, or a copy, in which each row ends in memory where the next one begins."""
    return x if x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1) else x.contiguous()


def _read_elements(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Return y as a view of x, without overlapping elements; the rows of x must be contiguous.

    Raises:
        ValueError: if an element would be outside x, or if elements would overlap.
    """
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
