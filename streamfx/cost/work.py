"""The work of operators: FLOPs, bytes moved, launches, and communication with other ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from streamfx.cost.comm import KINDS, Traffic


class Work(NamedTuple):
    """Counters of work: FLOPs, bytes moved by operators without FLOPs, FLOPs of fused attention, and launched operators.

    `product_bytes` are read and written by products; of these, `total_bytes` belong to totals to which products are
    added. For each kind of communication, there are the calls, the bytes, and the bytes that leave the machine.
    `masked_flops` are FLOPs of fused attention without a causal flag; a mask may hide some. `fused` and `kernels` are the
    bytes moved and the kernels launched if a compiler fuses element-wise operators (`fusion.py`). `cudnn`, `flash`, and
    their `_backward` are attention FLOPs by kernel and pass; the remaining attention FLOPs are in slower kernels.
    """

    flops: int = 0
    moved: int = 0
    attention_flops: int = 0
    launches: int = 0
    product_bytes: int = 0
    total_bytes: int = 0
    gathers: int = 0
    gathered: int = 0
    gathered_far: int = 0
    reductions: int = 0
    reduced: int = 0
    reduced_far: int = 0
    exchanges: int = 0
    exchanged: int = 0
    exchanged_far: int = 0
    masked_flops: int = 0
    fused: int = 0
    kernels: int = 0
    cudnn: int = 0
    cudnn_backward: int = 0
    flash: int = 0
    flash_backward: int = 0

    @property
    def compiled(self) -> Work:
        """The same work with element-wise operators fused."""
        return self._replace(moved=self.fused, launches=self.kernels)

    @property
    def traffic_by_kind(self) -> dict[str, Traffic]:
        """The traffic by kind."""
        gathers = Traffic(self.gathers, self.gathered, self.gathered_far)
        reductions = Traffic(self.reductions, self.reduced, self.reduced_far)
        exchanges = Traffic(self.exchanges, self.exchanged, self.exchanged_far)
        return dict(zip(KINDS, (gathers, reductions, exchanges), strict=True))

    def without_hidden(self, hidden: int) -> Work:
        """Return the work without `hidden` attention FLOPs, on pairs that masks hide, taken from each kernel in proportion."""

        def visible(flops: int) -> int:
            """Return the FLOPs of a kernel that masks do not hide."""
            return flops - hidden * flops // self.attention_flops if hidden else flops

        kernels = {name: visible(getattr(self, name)) for name in ATTENTION}
        return self._replace(flops=self.flops - hidden, attention_flops=self.attention_flops - hidden, **kernels)

    def plus(self, other: Work) -> Work:
        """Return the sum of both, counter by counter."""
        return Work(*map(operator.add, self, other))

    def minus(self, other: Work) -> Work:
        """Return the difference, counter by counter."""
        return Work(*map(operator.sub, self, other))


ATTENTION = ("cudnn", "cudnn_backward", "flash", "flash_backward")  # fields with attention FLOPs by kernel and pass
NO_WORK = Work()


def total_work(works: Iterable[Work]) -> Work:
    """Return the sum of all works."""
    return reduce(Work.plus, works, NO_WORK)
