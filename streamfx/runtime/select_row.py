"""Select a row of the sequence, or the final value of a loop over rows, by a sum over chunks.

The chunk that holds the row returns it, other chunks return -0: it is the additive identity that preserves all values,
signed zeros included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def additive_identity(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of -0, the contribution to a sum over chunks of a chunk that does not hold the value: -0 + x == x."""
    return torch.full(sizes, complex(-0.0, -0.0) if dtype.is_complex else -0.0, dtype=dtype, device=device)


def take_row(rows: Tensor, dim: int, position: int) -> Tensor:
    """Return the row at index `position` of a chunk, or the additive identity if another chunk holds it."""
    if 0 <= position < rows.shape[dim]:
        return rows.select(dim, position)
    return additive_identity(rows.shape[:dim] + rows.shape[dim + 1 :], rows.dtype, rows.device)


def put_row(row: Tensor, dim: int, position: int, count: int) -> Tensor:
    """Return a chunk of `count` zero rows, except for `row` at index `position` if the chunk holds it."""
    rows = row.new_zeros(*row.shape[:dim], count, *row.shape[dim:])
    if 0 <= position < count:
        rows.select(dim, position).copy_(row)
    return rows
