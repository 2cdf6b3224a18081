"""Rows of tensors, and buffers that hold rows for the whole of a loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamfx.kernels import accumulate


def rows_of(tensor: Tensor, dim: int, outer: int, inner: int, length: int, start: int, count: int) -> Tensor:
    """Rows [start, start + count) of a dimension that is (outer, length, inner); a view unless `outer` is split off."""
    if outer == 1:
        return tensor.narrow(dim, start * inner, count * inner)
    split = tensor.unflatten(dim, (outer, length * inner)).narrow(dim + 1, start * inner, count * inner)
    return split.flatten(dim, dim + 1)


def rows_view(tensor: Tensor, dim: int, outer: int, inner: int, length: int, start: int, count: int) -> Tensor:
    """The same rows, always as a view: with the outer factor as a dimension of its own."""
    if outer == 1:
        return tensor.narrow(dim, start * inner, count * inner)
    return tensor.unflatten(dim, (outer, length * inner)).narrow(dim + 1, start * inner, count * inner)


def append(visible: Tensor, own: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
    """Write a chunk's rows into a prefix buffer and return the rows that the chunk's queries see."""
    own.copy_(value.reshape(own.shape))
    return visible.reshape(shape)


def add_rows(visible: Tensor, part: Tensor, is_first: bool) -> None:
    """Add cotangents to the rows that the chunk's queries saw, or write them there if these are all rows and nobody has yet."""
    accumulate.add(visible, part.reshape(visible.shape), is_first)


def complete(own: Tensor, added: None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The chunk's own rows of a sum, once all chunks that add to them (`added` is the last) have done so."""
    return own.to(dtype).reshape(shape)
