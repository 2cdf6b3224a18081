"""What one chunk alone makes, and a sum over chunks hands on: a row of the sequence, or what a loop over rows leaves behind.

Other chunks add -0, with which the sum begins, too: it is the number that changes none, zeros with a sign included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nothing_to_add(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a chunk adds that does not make the value."""
    return torch.full(sizes, complex(-0.0, -0.0) if dtype.is_complex else -0.0, dtype=dtype, device=device)


def take_row(rows: Tensor, dim: int, position: int) -> Tensor:
    """Row number `position` of a chunk; what adds nothing where another one holds it, so that the sum over chunks is the row."""
    if 0 <= position < rows.shape[dim]:
        return rows.select(dim, position)
    return nothing_to_add(rows.shape[:dim] + rows.shape[dim + 1 :], rows.dtype, rows.device)


def put_row(row: Tensor, dim: int, position: int, count: int) -> Tensor:
    """A chunk of `count` rows that are zero, but for number `position` if the chunk holds it."""
    rows = row.new_zeros(*row.shape[:dim], count, *row.shape[dim:])
    if 0 <= position < count:
        rows.select(dim, position).copy_(row)
    return rows
