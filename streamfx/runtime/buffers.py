"""Slices of tensors along the sequence, and buffers that live for the duration of a loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamfx.kernels import accumulate


def rows_of(tensor: Tensor, dim: int, outer: int, inner: int, length: int, start: int, count: int) -> Tensor:
    """Return rows [start, start + count) of a dimension that factors into (outer, length, inner); a view if `outer` is 1."""
    if outer == 1:
        return tensor.narrow(dim, start * inner, count * inner)
    split = tensor.unflatten(dim, (outer, length * inner)).narrow(dim + 1, start * inner, count * inner)
    return split.flatten(dim, dim + 1)


def rows_view(tensor: Tensor, dim: int, outer: int, inner: int, length: int, start: int, count: int) -> Tensor:
    """Return the rows [start, start + count) as a view: if `outer` is not 1, it becomes a separate dimension."""
    if outer == 1:
        return tensor.narrow(dim, start * inner, count * inner)
    return tensor.unflatten(dim, (outer, length * inner)).narrow(dim + 1, start * inner, count * inner)


def append(visible: Tensor, own: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
    """Write a chunk's rows into `own`, its slice of a buffer; return `visible`, the rows that the chunk's queries see.

    Both are views of one buffer, which earlier chunks have filled.
    """
    own.copy_(value.reshape(own.shape))
    return visible.reshape(shape)


def add_rows(visible: Tensor, part: Tensor, is_first: bool) -> None:
    """Add cotangents to the buffer's rows that the chunk's queries saw; overwrite the rows if `is_first` (uninitialized)."""
    accumulate.add_part(visible, part.reshape(visible.shape), is_first)


def complete(own: Tensor, added: None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the chunk's rows of a sum over chunks. `added` is unused: it orders this call after `add_rows`."""
    return own.to(dtype).reshape(shape)
