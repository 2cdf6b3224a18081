"""Convert scores indexed by distance to scores indexed by key: each row shifts one column further left.

    relative_shift(x [.. t w ..], first, columns) -> y [.. t columns ..]        y[i, j] = x[i, first - i + j]
    relative_shift_backward(dy, first, width) -> dx [.. t width ..]             its adjoint: zeros where y reads nothing

Rows and columns are the dimensions `dim` and `dim + 1`. If an index exceeds the width, y reads the first columns of
the next row. A slice of rows and columns of y is the same operator with another `first`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("relative_shift(Tensor x, int dim, SymInt first, SymInt columns) -> Tensor")
_library.define("relative_shift_backward(Tensor gradient, int dim, SymInt first, SymInt width) -> Tensor")


def shift_rows(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Return the scores indexed by key: the operator's implementation."""
    return _read_elements(_rows_contiguous(x, dim), dim, first, columns).clone(memory_format=torch.contiguous_format)


def shift_rows_backward(gradient: Tensor, dim: int, first: int, width: int) -> Tensor:
    """Return the gradient of x: zeros, with `gradient` written where `shift_rows` read."""
    result = gradient.new_zeros(_with_columns(gradient, dim, width))
    _read_elements(result, dim, first, gradient.shape[dim + 1]).copy_(gradient)
    return result


def _rows_contiguous(x: Tensor, dim: int) -> Tensor:
    """Return x with rows contiguous in memory."""
    return x if x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1) else x.contiguous()


def _read_elements(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    """Return the elements of x that `shift_rows` reads, as a view without overlapping elements."""
    rows, width, step = x.shape[dim], x.shape[dim + 1], x.stride(dim + 1)
    shape, strides = _with_columns(x, dim, columns), list(x.stride())
    if 0 in shape:
        return x.new_empty(shape)
    last = first + (rows - 1) * (width - 1) + columns
    if first < 0 or last > rows * width or (columns >= width and rows > 1):
        raise ValueError(f"a shift of {rows} rows of {width} columns has no {columns} columns from index {first} on")
    strides[dim] -= step
    return x.as_strided(shape, strides, x.storage_offset() + first * step)


def _with_columns(x: Tensor, dim: int, columns: int) -> list[int]:
    """Return the shape of x with another number of columns."""
    return [*x.shape[: dim + 1], columns, *x.shape[dim + 2 :]]


def _like(x: Tensor, dim: int, first: int, columns: int) -> Tensor:
    return x.new_empty(_with_columns(x, dim, columns))


def _register(name: str, function: Any) -> Any:
    """Register an operator and its fake implementation, and return it."""
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"streamfx::{name}", _like, lib=_library)
    return getattr(torch.ops.streamfx, name).default


RELATIVE_SHIFT = _register("relative_shift", shift_rows)
RELATIVE_SHIFT_BACKWARD = _register("relative_shift_backward", shift_rows_backward)
