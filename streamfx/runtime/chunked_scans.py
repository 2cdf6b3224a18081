"""Cumulative sums and similar scans, chunk by chunk: a chunk starts from the total of the chunks before it.

The `carry` holds the running total, one row wide. The loop that runs in the scan's own direction saves the carry at
the start of each chunk in `states` [chunks, ...], so that a loop in the other direction can recompute any chunk's
rows. `kind` is a key of `SCANS`: "cumsum", "cumprod" or "logcumsumexp"; `reverse`: from the last row to the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.scans import REVERSE_SCANS, SCANS, reverse_scan

# keyed by the kind of scan: combines the total of earlier rows with a row
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cumsum": torch.add,
    "cumprod": torch.mul,
    "logcumsumexp": torch.logaddexp,
}


for kind, operator in REVERSE_SCANS.items():
    implement(operator, reverse_scan(kind))


def carry_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of totals: half dtypes accumulate in float32, as the operators do internally."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def advance(
    kind: str,
    reverse: bool,
    rows: Tensor,
    dim: int,
    dtype: torch.dtype,
    carry: Tensor,
    rows_before: int,
    states: Tensor | None,
    index: int,
) -> Tensor:
    """Return the chunk's rows of a scan along `dim`, in this dtype, and update the carry in place.

    `rows_before` is the number of rows before the chunk in the scan's direction; if it is 0, the carry is not read. If `states`
    is not None, save the old carry there at `index`, the chunk's index.
    """
    if states is not None:
        states[index].copy_(carry)
    scanned = _scanned(kind, reverse, rows, dim, carry, rows_before)
    if scanned.shape[dim]:
        carry.copy_(scanned.narrow(dim, 0 if reverse else scanned.shape[dim] - 1, 1))
    return scanned.to(dtype)


def resume(
    kind: str, reverse: bool, rows: Tensor, dim: int, dtype: torch.dtype, rows_before: int, states: Tensor, index: int
) -> Tensor:
    """Recompute the chunk's rows of a scan from the carry that `advance` saved at `index`; arguments as in `advance`."""
    return _scanned(kind, reverse, rows, dim, states[index], rows_before).to(dtype)


def _scanned(kind: str, reverse: bool, rows: Tensor, dim: int, carry: Tensor, rows_before: int) -> Tensor:
    """Return the scanned rows, in the dtype of the carry, starting from the carry if there are rows before them.

    The carry is combined with the first row before the scan, not with all rows after it. This keeps eager's order: for
    example, a product over the chunk alone could overflow although the carry is zero.
    """
    has_carry = rows_before > 0 and rows.shape[dim] > 0
    rows = rows.to(carry.dtype, copy=has_carry)
    if has_carry:
        first_row = rows.narrow(dim, rows.shape[dim] - 1 if reverse else 0, 1)
        first_row.copy_(COMBINE[kind](carry, first_row))
    return reverse_scan(kind)(rows, dim) if reverse else SCANS[kind](rows, dim)
