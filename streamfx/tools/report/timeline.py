"""Timelines of a step: bytes alive over predicted seconds, by memory category, for streamfx and the baselines.

A `Curve` has the bytes alive after each allocation and free, with the work (FLOPs, bytes moved, launches) done until then; a rate
per unit of work turns it into a timeline. Each *way* of running the step (streamfx, eager, ...) has its own, called a *course*.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, ClassVar

from streamfx.cost.curve import Curve, extreme_indices
from streamfx.cost.work import Work
from streamfx.renamed import RenamedAttributes

Seconds = Callable[[Work], float]


@dataclass(frozen=True)
class LoopTime(RenamedAttributes):
    """The interval of a loop in seconds since the start of the step.

    `sampled_chunks` of its `chunks` were traced; each also represents its neighbors.
    """

    name: str
    start: float
    end: float
    chunks: int
    sampled_chunks: int
    renamed: ClassVar[Mapping[str, str]] = {"begins": "start", "drawn": "sampled_chunks", "ends": "end"}

    def as_dict(self) -> dict[str, Any]:
        """Convert the interval to values that JSON can represent."""
        times = {"begins": self.start, "ends": self.end}
        return {"name": self.name, **times, "chunks": self.chunks, "drawn": self.sampled_chunks}


@dataclass(frozen=True)
class MemoryTimeline(RenamedAttributes):
    """Bytes alive during one way of running a step, by memory category.

    `terms`: by category, its bytes from moment `seconds[i]` to the next one, for each i; persistent categories first, temporary
    ones last. `backward_start`: when the backward pass begins, `end` if there is none. `end`: when the step ends.
    """

    way: str
    seconds: tuple[float, ...]
    terms: Mapping[str, tuple[int, ...]]
    backward_start: float
    end: float
    flops: int = 0
    loops: tuple[LoopTime, ...] = ()
    renamed: ClassVar[Mapping[str, str]] = {"turn": "backward_start"}

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
        """Convert the timeline to values that JSON can represent; key "turn" is the start of the backward pass, in seconds."""
        terms = {name: list(sizes) for name, sizes in self.terms.items()}
        loops = [loop.as_dict() for loop in self.loops]
        course = {"way": self.way, "seconds": list(self.seconds), "terms": terms, "loops": loops}
        return {**course, "turn": self.backward_start, "end": self.end, "flops": self.flops}


@dataclass(frozen=True)
class Timeline:
    """The courses of a step: the streamed step first, then its baselines.

    `source`: "predicted" or "measured". `clock`: a text that says how seconds were predicted or measured.
    """

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
    """Return a curve as a timeline; `seconds(work)` predicts the time that some work takes, and `way` names the strategy.

    If the FLOPs along the curve include attention on masked pairs, `flops` are those of the step without them; then all times
    are scaled, so that the step ends when it would without them.
    """
    unscaled_end = seconds(curve.work)
    end = unscaled_end if flops is None else seconds(curve.work.without_hidden(curve.work.flops - flops))
    scale = end / unscaled_end if unscaled_end else 1.0
    moments, latest = list[float](), 0.0
    for point in curve.points:
        latest = max(latest, scale * seconds(point.work))  # predicted times must not decrease
        moments.append(latest)
    loops = tuple(
        LoopTime(loop.name, scale * seconds(loop.start), scale * seconds(loop.end), loop.chunks, loop.sampled_chunks)
        for loop in curve.loops
    )
    backward_start = scale * seconds(curve.backward_start) if curve.backward_start is not None else end
    flops = curve.work.flops if flops is None else flops
    return MemoryTimeline(way, tuple(moments), _terms_of(curve), backward_start, end, flops, loops)


def _terms_of(curve: Curve) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each memory category at each point of a curve, from the most constant category to the most variable.

    Variable is a category with many changes relative to its largest size. Categories that are always empty are omitted.
    """
    names = list(dict.fromkeys(name for point in curve.points for name in point.terms))
    sizes = {name: tuple(point.terms.get(name, 0) for point in curve.points) for name in names}
    changes = {
        name: sum(abs(after - before) for before, after in pairwise(column)) / max(column)
        for name, column in sizes.items()
        if any(column)
    }
    return {name: sizes[name] for name in sorted(changes, key=changes.__getitem__)}


# -- the JSON trace event format, which Perfetto and Chrome's tracing open


MICROSECONDS = 1e6
STAGES, LOOPS = 1, 2  # tracks
Event = dict[str, Any]


def trace_of(timeline: Timeline, stage_of: Mapping[str, str]) -> str:
    """Return a trace with bytes by category as counters, and stages and loops as slices.

    Each way of running the step is a separate process of the trace. `stage_of` maps loop names to stage names.
    """
    source = timeline.source
    events = [event for number, course in enumerate(timeline.courses, 1) for event in _counter_events(course, number, source)]
    for track, name in ((STAGES, "stages"), (LOOPS, "loops")):
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}})
    events += _slices(timeline.ours.loops, stage_of)
    metadata = {"source": f"{source} by streamfx", "time": f"{source} seconds: {timeline.clock}"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata})


def _counter_events(course: MemoryTimeline, process: int, source: str) -> Iterator[Event]:
    """Yield the events of one way of running the step: its process name, and its bytes by memory category at each moment.

    `process`: the number of its process in the trace. `source`: "predicted" or "measured".
    """
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{course.way} ({source})"}}
    for i, at in enumerate(course.seconds):
        sizes = {name: column[i] for name, column in course.terms.items()}
        yield {"ph": "C", "name": "bytes alive", "pid": process, "ts": at * MICROSECONDS, "args": sizes}
    nothing = dict.fromkeys(course.terms, 0)
    yield {"ph": "C", "name": "bytes alive", "pid": process, "ts": course.end * MICROSECONDS, "args": nothing}


def _slices(loops: Sequence[LoopTime], stage_of: Mapping[str, str]) -> Iterator[Event]:
    """Yield a slice per loop, and a slice per stage that covers its consecutive loops; `stage_of`: loop name -> stage name."""
    for stage, run in groupby(loops, key=lambda loop: stage_of.get(loop.name)):
        loops_of_stage = list(run)
        for loop in loops_of_stage:
            chunks = {"chunks": loop.chunks, "chunks drawn": loop.sampled_chunks}
            yield _slice(loop.name, LOOPS, loop.start, loop.end, chunks)
        if stage:
            yield _slice(stage, STAGES, loops_of_stage[0].start, loops_of_stage[-1].end, {"loops": len(loops_of_stage)})


def _slice(name: str, thread: int, start: float, end: float, details: Event) -> Event:
    """Return the event of a slice from `start` to `end` (seconds) on track `thread` of the streamed step."""
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "name": name, "cat": "streamfx", "pid": 1, "tid": thread, **times, "args": details}
