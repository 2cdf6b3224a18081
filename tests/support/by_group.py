"""Stand-ins for the kernels that multiply by group, which run without a CUDA device and hold their contracts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from streamfx.kernels import grouped_mm
from streamfx.kernels.device_kinds import DeviceKind

A100, H100 = DeviceKind("cuda", (8, 0), True), DeviceKind("cuda", (9, 0), True)


class StandIns:
    """In place of `triton_grouped_mm.py`: rows are looked up, groups end where a tensor says, and what has no rows is left alone."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def add_outer(self, total: Tensor, x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> None:
        self.called["add_outer"] += 1
        assert total.shape == (len(ends), x.shape[1], y.shape[1]) and len(x) == len(y) == len(order) and x.dtype == y.dtype
        for own, rows in zip(total, self.groups(order, ends), strict=True):
            if len(rows):
                own += (x[rows].t() @ y[rows]).to(own.dtype)

    def multiply(self, x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        self.called["multiply"] += 1
        assert weight.shape[:2] == (len(ends), x.shape[1]) and len(x) == len(order) and x.dtype == weight.dtype
        out = x.new_zeros(len(order), weight.shape[2])
        for own, rows in zip(weight, self.groups(order, ends), strict=True):
            out[rows] = x[rows] @ own
        return out

    def groups(self, order: Tensor, ends: Tensor) -> list[Tensor]:
        assert order.dtype == torch.int64 and ends.dtype == torch.int32
        return [order[start:stop] for start, stop in pairwise([0, *ends.tolist()])]


@contextmanager
def in_their_place(kind: DeviceKind = A100) -> Iterator[StandIns]:
    """A device of this kind on the CPU, with float64 for a half type."""
    stand_ins = StandIns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_mm, "HALF", (*grouped_mm.HALF, torch.float64))
        patch.setattr(grouped_mm, "kind_of", lambda _: kind)
        patch.setattr(grouped_mm, "_triton", lambda: stand_ins)
        yield stand_ins
