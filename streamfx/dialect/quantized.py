"""A frozen weight, unpacked from few bits per element; only plans use it, so it has no implementation.

    unpacked(packed, scales, shape, dtype) -> the weight of this shape and dtype

`packed` and `scales` are byte tensors. A plan traces a model on fake tensors, where only sizes and dtypes matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.declare import declare


def _fake_unpacked(packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor of the unpacked shape, for tracing."""
    return packed.new_empty(shape, dtype=dtype)


UNPACKED = declare("unpacked(Tensor packed, Tensor scales, SymInt[] shape, ScalarType dtype) -> Tensor", _fake_unpacked)
