"""Findings, and how they are measured: seconds of work, distances of numbers, what runs on the device."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.place import Place

ROUNDS, LEAST = 3, 0.02  # times that work is measured, each for so many seconds at least
NEAR = 1.5  # an error this many times eager's own, in the same type, is off
NOISE = 1e-6  # an error below this is rounding, whatever eager's own is
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # run beside kernels, on engines of their own


@dataclass(frozen=True)
class Finding:
    """Figures of a case, by names that end in their units. `detail`: for the file, not for the table, unless it is `off`."""

    case: str
    figures: Mapping[str, Any]
    off: bool = False
    detail: bool = False

    def row(self, check: str) -> dict[str, Any]:
        figures = {name: _rounded(value) for name, value in self.figures.items()}
        marks = {name: True for name in ("off", "detail") if getattr(self, name)}
        return {"check": check, "case": self.case, "figures": figures, **marks}


def _rounded(value: Any) -> Any:
    """Four digits; JSON has no numbers that are not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def seconds(place: Place, work: Callable[[], object]) -> float:
    """The best mean time of some runs, after one that compiles and allocates; short work is repeated in each."""
    work()
    place.wait()
    count = max(1, min(20, int(LEAST / max(_timed(place, work, 1), 1e-6))))
    return min(_timed(place, work, count) for _ in range(ROUNDS))


def _timed(place: Place, work: Callable[[], object], count: int) -> float:
    place.wait()
    start = time.perf_counter()
    for _ in range(count):
        work()
    place.wait()
    return (time.perf_counter() - start) / count


def distance(found: Tensor, truth: Tensor) -> float:
    """The norm of the difference over the truth's; infinite if a number is not finite."""
    own = float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
    return own if own == own else float("inf")


def is_off(error: float, eager: float) -> bool:
    """Whether an error is larger than rounding explains.

    >>> is_off(1.2e-2, 1e-2), is_off(2e-2, 1e-2), is_off(1e-7, 1e-9), is_off(float("nan"), 1.0)
    (False, True, False, True)
    """
    return not error <= NEAR * eager + NOISE


def operators(work: Callable[[], object], *parts: str) -> str:
    """Names of the operators that work runs, nested ones, too, in order: those that contain one of the parts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    names = (event.name().removeprefix("aten::") for event in _events(profiler))
    return ", ".join(dict.fromkeys(name for name in names if any(part in name for part in parts)))


@dataclass(frozen=True)
class Activity:
    """One run of some work: kernels that it launched (on a CPU, operators), and the share of its time without a kernel."""

    launches: int
    idle: float | None


def activity(place: Place, work: Callable[[], object]) -> Activity:
    """Run work once under the profiler."""
    kind = ProfilerActivity.CUDA if place.has_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        start = time.perf_counter()
        work()
        place.wait()
        wall = time.perf_counter() - start
    if not place.has_cuda:
        return Activity(len(_events(profiler)), None)
    ran = [event for event in _events(profiler) if event.device_type().name == "CUDA" and event.name()[:11] not in COPIES]
    busy = covered((event.start_ns(), event.start_ns() + event.duration_ns()) for event in ran)
    return Activity(sum(not event.name().startswith(("Memcpy", "Memset")) for event in ran), 1 - busy / 1e9 / wall)


@contextmanager
def host_waits(place: Place) -> Iterator[list[str]]:
    """What made the host wait for the device, a message for each time; to read the loss is one. Nothing on a CPU."""
    waits: list[str] = []
    if not place.has_cuda:
        yield waits
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield waits
        waits += [str(item.message) for item in seen if "synchroniz" in str(item.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _events(profiler: Any) -> list[Any]:
    """What the profiler saw, without the tree that `events()` makes of it: of a step that takes many seconds."""
    results = profiler.profiler.kineto_results
    return sorted(results.events(), key=lambda event: event.start_ns())


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length that spans cover together.

    >>> covered([(0, 4), (2, 5), (7, 8)])
    6
    """
    total = 0
    end = -(1 << 62)
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
