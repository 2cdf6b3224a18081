"""Scans from the last row to the first: `reverse_cumsum`, `reverse_cumprod` and `reverse_logcumsumexp`.

    reverse_cumsum([1, 2, 3], dim=0) -> [6, 5, 3]

Passes write them for `flip(cumsum(flip(x)))`, as in the gradient of a cumulative sum, so that a loop can run over the chunks
from last to first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streamfx.dialect.declare import declare
from streamfx.torch_private import OpOverload

# keyed by the kind of scan: the function (rows, dim) -> scanned rows, from the first row to the last
SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
}


def reverse_scan(kind: str) -> Callable[[Tensor, int], Tensor]:
    """Return a function (rows, dim) that scans from the last row to the first; `kind` is a key of `SCANS`."""
    return lambda rows, dim: SCANS[kind](rows.flip(dim), dim).flip(dim)


# keyed by the kind of scan; on fake tensors the real code runs: its result is contiguous even if the operand is not
REVERSE_SCANS: dict[str, OpOverload] = {
    kind: declare(f"reverse_{kind}(Tensor self, int dim) -> Tensor", fake=reverse_scan(kind)) for kind in SCANS
}
