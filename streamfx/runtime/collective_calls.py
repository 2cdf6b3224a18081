"""An all-reduce, split into the start of the collective and the wait for its result.

    all_reduce(x, "sum", group)    = end(begin(x, "sum", group))      element by element, over the same elements of all ranks

In a graph it is a single operator, so that no pass saves, copies or returns a buffer whose result has not arrived. A
loop body contains `begin` and `end` separately, so that independent work runs in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.dialect.declare import implement


def begin(x: Tensor, op: str, group: str) -> Tensor:
    """Start an all-reduce of x over a process group (by name), and return the tensor that will hold its result.

    `op`: "sum" or another reduction. If there are no rows, there are none on any rank, and nothing is sent.
    """
    if not x.numel():
        return torch.empty_like(x)
    return torch.ops._c10d_functional.all_reduce.default(x, op, group)


def end(x: Tensor) -> Tensor:
    """Wait for the result of an all-reduce that `begin` has started, and return it; x is the result of `begin`."""
    return torch.ops._c10d_functional.wait_tensor.default(x) if x.numel() else x


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    return end(begin(x, op, group))


implement(ALL_REDUCE, _all_reduce)
