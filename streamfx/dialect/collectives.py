"""A reduction over ranks as one operator, which begins the collective and waits for its result.

    all_reduce(x, op="sum", group) -> a tensor like x           element by element, over the same elements of all ranks

Functional collectives return a buffer whose result has not arrived. With this operator no graph has such a buffer, which a
pass could save, copy or return. `group` is the name of the process group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.declare import declare


def _like(x: Tensor, op: str, group: str) -> Tensor:
    """Return an uninitialized result."""
    return torch.empty_like(x)


ALL_REDUCE = declare("all_reduce(Tensor x, str op, str group) -> Tensor", _like)
