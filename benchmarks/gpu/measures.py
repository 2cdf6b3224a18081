"""What is measured: seconds of short work on a device, and how far numbers are off."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

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


def distance(found: Tensor, truth: Tensor) -> float:
    """The norm of the difference, of the truth's."""
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30))
