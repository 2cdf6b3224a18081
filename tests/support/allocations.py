"""What a call allocates, as the profiler sees it: also under Dynamo, which compiles nothing inside of a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.profiled import records_of


@dataclass(frozen=True)
class Allocations:
    """Bytes that were alive at the most, beyond those before, and those of the largest allocation."""

    peak: int
    largest: int

    @staticmethod
    def of(call: Callable[[], Any]) -> Allocations:
        sizes = [record.nbytes() for record in records_of(call, profile_memory=True) if record.name() == "[memory]"]
        alive = peak = 0
        for size in sizes:
            alive += size
            peak = max(peak, alive)
        return Allocations(peak, max(sizes, default=0))
