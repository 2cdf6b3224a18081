"""Seconds of short work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.gpu import Place

RUNS = 5


def seconds(place: Place, work: Callable[[], object]) -> float:
    """The best of a few runs, after one that compiles and allocates."""
    work()
    best = float("inf")
    for _ in range(RUNS):
        place.wait()
        start = time.perf_counter()
        work()
        place.wait()
        best = min(best, time.perf_counter() - start)
    return best
