"""Slices of tensors along the sequence, and buffers that live for the duration of a loop over chunks of the sequence.

A prefix buffer holds the keys or values of all rows so far, chunk after chunk; its counterpart in the backward graph is a sum of
the gradients of these rows, to which each chunk adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamfx.kernels import accumulate


def rows_of(tensor: Tensor, dim: int, outer: int, inner: int, length: int, start: int, count: int) -> Tensor:
    """Return rows [start, start + count) of dimension `dim`, a product of (outer, length, inner) with `length` rows.

    The result has the size outer * count * inner there. It is a view if `outer` is 1, else a copy.
    """
    if outer == 1:
        return tensor.narrow(dim, start * inner, count * inner)
    split = tensor.unflatten(dim, (outer, length * inner)).narrow(dim + 1, start * inner, count * inner)
    return split.flatten(dim, dim + 1)


def rows_view(tensor: Tensor, dim: int, outer: int, inner: int, length: int, start: int, count: int) -> Tensor:
    """Return rows [start, start + count) of dimension `dim`, a product of (outer, length, inner), as a view.

    If `outer` is not 1, it becomes a separate dimension, before one of the size count * inner.
    """
    if outer == 1:
        return tensor.narrow(dim, start * inner, count * inner)
    return tensor.unflatten(dim, (outer, length * inner)).narrow(dim + 1, start * inner, count * inner)


def append(visible: Tensor, own: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
    """Write a chunk's rows `value` into `own`, its slice of a buffer; return `visible`, the rows that the chunk's queries see.

    Both are views of one buffer, which earlier chunks have filled up to this chunk. The result has the given shape.
    """
    own.copy_(value.reshape(own.shape))
    return visible.reshape(shape)


def add_rows(visible: Tensor, part: Tensor, is_first: bool) -> None:
    """Add cotangents to the buffer's rows that the chunk's queries saw; overwrite the rows if `is_first` (uninitialized)."""
    accumulate.add_part(visible, part.reshape(visible.shape), is_first)


def complete(own: Tensor, added: None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the chunk's rows `own` of a sum over chunks, to which no later chunk adds, in this shape and dtype.

    `added`, the result of `add_rows`, is unused: it orders this call after that one.
    """
    return own.to(dtype).reshape(shape)
