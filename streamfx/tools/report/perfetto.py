"""Export a timeline in the JSON trace event format, which Perfetto and Chrome's tracing open.

Event keys: `ph` is the kind of event ("M" metadata, "C" a counter, "X" a slice with a duration), `ts` its time and `dur` its
duration in microseconds, `pid` and `tid` its process and track. Each way of running the step is a process; the streamed one is 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamfx.tools.report.timeline import LoopTime, MemoryTimeline, Timeline

MICROSECONDS = 1e6
STAGES, LOOPS = 1, 2  # tracks
Event = dict[str, Any]


def trace_of(timeline: Timeline, stage_of: Mapping[str, str]) -> str:
    """Return a trace with bytes by category as counters, and stages and loops as slices.

    Each way of running the step is a separate process of the trace. `stage_of` maps loop names to stage names.
    """
    source = timeline.source
    events = [event for number, course in enumerate(timeline.courses, 1) for event in _counter_events(course, number, source)]
    events += _track_name(1, STAGES, "stages"), _track_name(1, LOOPS, "loops")
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


def _track_name(process: int, thread: int, name: str) -> Event:
    """Return the event that names a track."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slices(loops: Sequence[LoopTime], stage_of: Mapping[str, str]) -> Iterator[Event]:
    """Yield a slice per loop, and a slice per stage that covers its consecutive loops; `stage_of`: loop name -> stage name."""
    open_: list[LoopTime] = []
    for loop in loops:
        if open_ and stage_of.get(open_[0].name) != stage_of.get(loop.name):
            yield from _stage_slices(open_, stage_of)
            open_ = []
        open_.append(loop)
        chunks = {"chunks": loop.chunks, "chunks drawn": loop.sampled_chunks}
        yield _slice(loop.name, LOOPS, loop.start, loop.end, chunks)
    yield from _stage_slices(open_, stage_of)


def _stage_slices(loops: Sequence[LoopTime], stage_of: Mapping[str, str]) -> Iterator[Event]:
    """Yield one slice that covers consecutive loops of a stage; none if there are no loops, or their stage is unknown."""
    if loops and (name := stage_of.get(loops[0].name)):
        yield _slice(name, STAGES, loops[0].start, loops[-1].end, {"loops": len(loops)})


def _slice(name: str, thread: int, start: float, end: float, details: Event) -> Event:
    """Return the event of a slice from `start` to `end` (seconds) on track `thread` of the streamed step."""
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "name": name, "cat": "streamfx", "pid": 1, "tid": thread, **times, "args": details}
