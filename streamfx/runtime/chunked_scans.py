"""Cumulative sums and similar scans, chunk by chunk: a chunk starts from the total of the chunks before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.scans import REVERSE_SCANS, SCANS, reverse_scan
from streamfx.ir.recurrence import ROWS, RecurrenceAxes
from streamfx.ir.sizes import Size, product
from streamfx.runtime.chunked_recurrences import Chunk, Recurrence

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


class RunningTotal(Recurrence):
    """A cumulative sum, or another scan, along `dim`; its carry holds the total of the rows so far, as one row.

    `kind` is a key of `SCANS`: "cumsum", "cumprod" or "logcumsumexp"; `reverse`: from the last row to the first.
    """

    def __init__(self, kind: str, reverse: bool, dim: int, dtype: torch.dtype, row_size: Size) -> None:
        """Describe a scan whose result has this dtype, and `row_size` elements in each row."""
        super().__init__(kind, RecurrenceAxes((), (), ROWS))
        self.kind, self.reverse, self.dim, self.dtype, self.row_size = kind, reverse, dim, dtype, row_size
        self.carry_size = product((row_size, carry_type(dtype).itemsize))

    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the scanned rows of the chunk; update the total.

        The total is combined with the first row before the scan, not with all rows after it. This keeps eager's order: for
        example, a product over the chunk alone could overflow although the total is zero.
        """
        (rows,), dim, reverse = operands, self.dim, self.reverse
        last = rows.shape[dim] - 1
        has_carry = chunk.before > 0 and last >= 0
        rows = rows.to(carry_type(self.dtype), copy=has_carry)
        if has_carry and chunk.carry is not None:
            first_row = rows.narrow(dim, last if reverse else 0, 1)
            total = chunk.carry.view(rows.dtype).view(first_row.shape)
            first_row.copy_(COMBINE[self.kind](total, first_row))
        scanned = (reverse_scan if reverse else SCANS.__getitem__)(self.kind)(rows, dim)
        if chunk.next_carry is not None and last >= 0:
            chunk.next_carry.view(rows.dtype).copy_(scanned.narrow(dim, 0 if reverse else last, 1).reshape(-1))
        return (scanned.to(self.dtype),)
