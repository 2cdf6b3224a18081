"""What a call allocates, as the profiler sees it: also under Dynamo, which compiles nothing inside of a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocations:
    """Bytes that were alive at the most, beyond those before, and those of the largest allocation."""

    peak: int
    largest: int

    @staticmethod
    def of(call: Callable[[], Any]) -> Allocations:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
        events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        alive = peak = 0
        for _, size in sorted(sizes, key=lambda entry: entry[0]):
            alive += size
            peak = max(peak, alive)
        return Allocations(peak, max((size for _, size in sizes), default=0))
