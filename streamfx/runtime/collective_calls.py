"""A value reduced over ranks: begun, and waited for.

    all_reduce(x, "sum", group)    = end(begin(x, "sum", group))      element by element, over the same elements of all ranks

In a graph it is one operator, so that nobody keeps, copies or hands over what has not arrived yet. A loop's body has it in two,
so that what does not need it runs meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("all_reduce(Tensor x, str op, str group) -> Tensor")


def begin(x: Tensor, op: str, group: str) -> Tensor:
    """What will hold the result. Where there are no rows there are none on any rank, and nothing is sent."""
    if not x.numel():
        return torch.empty_like(x)
    return torch.ops._c10d_functional.all_reduce.default(x, op, group)


def end(x: Tensor) -> Tensor:
    """The same, once it is there."""
    return torch.ops._c10d_functional.wait_tensor.default(x) if x.numel() else x


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    return end(begin(x, op, group))


_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
ALL_REDUCE = torch.ops.streamfx.all_reduce.default
