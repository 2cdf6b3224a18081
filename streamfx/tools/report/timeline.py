"""Timelines of a step: bytes alive over predicted seconds, by memory category, for streamfx and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from streamfx.cost.curve import Curve, LoopInterval, extreme_indices
from streamfx.cost.work import Work

Seconds = Callable[[Work], float]


@dataclass(frozen=True)
class LoopTime:
    """The interval of a loop in seconds. `sampled_chunks` of its `chunks` were traced; each also represents its neighbors."""

    name: str
    start: float
    end: float
    chunks: int
    sampled_chunks: int

    def as_dict(self) -> dict[str, Any]:
        """Convert the interval to values that JSON can represent."""
        times = {"begins": self.start, "ends": self.end}
        return {"name": self.name, **times, "chunks": self.chunks, "drawn": self.sampled_chunks}


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over one way of running a step. From `seconds[i]` on, each memory category in `terms` holds its i-th size.

    Persistent categories come first, temporary ones last. The backward pass begins at `backward_start`.
    """

    way: str
    seconds: tuple[float, ...]
    terms: Mapping[str, tuple[int, ...]]
    backward_start: float
    end: float
    flops: int = 0
    loops: tuple[LoopTime, ...] = ()

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The bytes alive at each moment, summed over all categories."""
        return tuple(map(sum, zip(*self.terms.values(), strict=True))) if self.terms else (0,) * len(self.seconds)

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=0)

    @property
    def peak(self) -> int:
        """The index of the moment at which most bytes are alive."""
        return self.totals.index(self.peak_bytes) if self.totals else 0

    def shortened(self, max_moments: int) -> MemoryTimeline:
        """Return a copy with at most this many moments that keeps all peaks."""
        moments = extreme_indices(self.totals, max_moments)
        terms = {name: tuple(sizes[i] for i in moments) for name, sizes in self.terms.items()}
        return replace(self, seconds=tuple(self.seconds[i] for i in moments), terms=terms)

    def as_dict(self) -> dict[str, Any]:
        """Convert the timeline to values that JSON can represent."""
        terms = {name: list(sizes) for name, sizes in self.terms.items()}
        loops = [loop.as_dict() for loop in self.loops]
        course = {"way": self.way, "seconds": list(self.seconds), "terms": terms, "loops": loops}
        return {**course, "turn": self.backward_start, "end": self.end, "flops": self.flops}


@dataclass(frozen=True)
class Timeline:
    """Timelines: the streamed step first, then its baselines. `source` says how they were obtained, `clock` how time was."""

    courses: tuple[MemoryTimeline, ...]
    clock: str
    source: str = "predicted"

    @property
    def ours(self) -> MemoryTimeline:
        return self.courses[0]

    @property
    def others(self) -> tuple[MemoryTimeline, ...]:
        return self.courses[1:]

    @property
    def peak_bytes(self) -> int:
        """The peak of the streamed step."""
        return self.ours.peak_bytes

    def as_dict(self) -> dict[str, Any]:
        """Convert the timelines to values that JSON can represent."""
        return {"clock": self.clock, "courses": [course.as_dict() for course in self.courses]}


def memory_timeline(way: str, curve: Curve, seconds: Seconds, flops: int | None = None) -> MemoryTimeline:
    """Map a curve to seconds. `flops` are its final FLOPs, if the FLOPs counted along the curve include masked ones."""
    end = seconds(curve.work)
    final = end if flops is None else seconds(curve.work.without_hidden(curve.work.flops - flops))
    scale = final / end if end else 1.0
    moments, latest = list[float](), 0.0
    for point in curve.points:
        latest = max(latest, scale * seconds(point.work))
        moments.append(latest)
    loops = tuple(_loop_time(loop, lambda work: scale * seconds(work)) for loop in curve.loops)
    backward_start = scale * seconds(curve.backward_start) if curve.backward_start is not None else final
    return MemoryTimeline(
        way, tuple(moments), _terms_of(curve), backward_start, final, curve.work.flops if flops is None else flops, loops
    )


def _loop_time(loop: LoopInterval, seconds: Seconds) -> LoopTime:
    return LoopTime(loop.name, seconds(loop.start), seconds(loop.end), loop.chunks, loop.sampled_chunks)


def _terms_of(curve: Curve) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each category at each point, sorted from the most constant category to the most variable."""
    names = list(dict.fromkeys(name for point in curve.points for name in point.terms))
    sizes = {name: tuple(point.terms.get(name, 0) for point in curve.points) for name in names}
    present = {name: column for name, column in sizes.items() if any(column)}
    return dict(sorted(present.items(), key=lambda item: _total_variation(item[1]) / max(item[1])))


def _total_variation(sizes: Sequence[int]) -> int:
    """Return the sum of all increases and decreases of a size over the step."""
    return sum(abs(after - before) for before, after in pairwise(sizes))
