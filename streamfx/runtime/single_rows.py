"""One row of the sequence, found in the chunk that holds it."""

from __future__ import annotations

from torch import Tensor


def take_row(rows: Tensor, dim: int, position: int) -> Tensor:
    """Row number `position` of a chunk; zeros where another chunk holds it, so that the sum over chunks is the row."""
    if 0 <= position < rows.shape[dim]:
        return rows.select(dim, position)
    return rows.new_zeros(rows.shape[:dim] + rows.shape[dim + 1 :])


def put_row(row: Tensor, dim: int, position: int, count: int) -> Tensor:
    """A chunk of `count` rows that are zero, but for number `position` if the chunk holds it."""
    rows = row.new_zeros(*row.shape[:dim], count, *row.shape[dim:])
    if 0 <= position < count:
        rows.select(dim, position).copy_(row)
    return rows
