"""Running sums and their kin, chunk by chunk: a chunk starts from what the chunks before it have left.

A `carry` holds the total so far, one row wide. The loop that runs in the scan's own direction writes the carry with which each
chunk starts into `states` [chunks, ...], so that a loop in the other direction can make any chunk's rows again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

library = torch.library.Library("streamfx", "FRAGMENT")

WITHIN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
}
JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cumsum": torch.add,
    "cumprod": torch.mul,
    "logcumsumexp": torch.logaddexp,
}


def from_the_end(kind: str) -> Callable[[Tensor, int], Tensor]:
    return lambda rows, dim: WITHIN[kind](rows.flip(dim), dim).flip(dim)


for kind in WITHIN:
    library.define(f"reverse_{kind}(Tensor self, int dim) -> Tensor")
    library.impl(f"reverse_{kind}", from_the_end(kind), "CompositeExplicitAutograd")
    # the same code on fake tensors: its result is contiguous even if the operand is not
    torch.library.register_fake(f"streamfx::reverse_{kind}", from_the_end(kind), lib=library)


def carry_type(dtype: torch.dtype) -> torch.dtype:
    """Totals of low precision numbers are kept as the operators keep them inside."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def advance(
    kind: str,
    reverse: bool,
    rows: Tensor,
    dim: int,
    dtype: torch.dtype,
    carry: Tensor,
    before: int,
    states: Tensor | None,
    index: int,
) -> Tensor:
    """The chunk's rows of a scan, `before` rows having been scanned; the carry moves on."""
    if states is not None:
        states[index].copy_(carry)
    scanned = _scanned(kind, reverse, rows, dim, carry, before)
    if scanned.shape[dim]:
        carry.copy_(scanned.narrow(dim, 0 if reverse else scanned.shape[dim] - 1, 1))
    return scanned.to(dtype)


def resume(
    kind: str, reverse: bool, rows: Tensor, dim: int, dtype: torch.dtype, before: int, states: Tensor, index: int
) -> Tensor:
    """The same rows again, from the state with which the chunk started."""
    return _scanned(kind, reverse, rows, dim, states[index], before).to(dtype)


def _scanned(kind: str, reverse: bool, rows: Tensor, dim: int, carry: Tensor, before: int) -> Tensor:
    """Rows of a scan, from the carry. It is joined to the first row, not to all scanned rows: in eager's order a product of the
    chunk alone, say, cannot overflow behind a carry of zero.
    """
    is_joined = before > 0 and rows.shape[dim] > 0
    rows = rows.to(carry.dtype, copy=is_joined)
    if is_joined:
        first = rows.narrow(dim, rows.shape[dim] - 1 if reverse else 0, 1)
        first.copy_(JOINED[kind](carry, first))
    return from_the_end(kind)(rows, dim) if reverse else WITHIN[kind](rows, dim)
