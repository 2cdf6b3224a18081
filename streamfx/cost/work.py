"""What operators have done so far: FLOPs, bytes moved, launches, and what was sent to other ranks."""

from __future__ import annotations

import operator
from typing import NamedTuple

from streamfx.cost.wire import KINDS, Traffic


class Work(NamedTuple):
    """FLOPs, bytes moved by operators without any, FLOPs of fused attention, and operators launched.

    Bytes that products read and write, and those of them that are of totals that they add to. Calls that send something to other
    ranks, the bytes, and those of them that leave the machine, by kind. FLOPs of fused attention without a causal flag, of which
    a mask may hide some.
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

    @property
    def wire(self) -> dict[str, Traffic]:
        """By kind what was sent."""
        gathers = Traffic(self.gathers, self.gathered, self.gathered_far)
        reductions = Traffic(self.reductions, self.reduced, self.reduced_far)
        exchanges = Traffic(self.exchanges, self.exchanged, self.exchanged_far)
        return dict(zip(KINDS, (gathers, reductions, exchanges), strict=True))

    def plus(self, other: Work) -> Work:
        return Work(*map(operator.add, self, other))

    def minus(self, other: Work) -> Work:
        return Work(*map(operator.sub, self, other))


NO_WORK = Work()
