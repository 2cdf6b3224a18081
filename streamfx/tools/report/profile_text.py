"""Summarize a measured step: bytes alive over time, its loops, and both as a short table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from streamfx.budget import format_bytes
from streamfx.cost.curve import MAX_POINTS
from streamfx.tools.report.stage_titles import joint_name, unnumbered
from streamfx.tools.report.text import counted, in_seconds, table_lines
from streamfx.tools.report.timeline import LoopTime, MemoryTimeline, Timeline

MEASURED = "measured"
HEADER = ("stage", "half", "loops", "chunks", "time", "share", "peak")
NO_LOOPS = (
    'no loop of streamfx ran: nothing in this block was compiled with backend="streambp", or its graphs run unchunked; '
    "streamfx.explain shows the reason"
)
COMPILED = "  compiling took {seconds} of it: the first step, or the first one of a new length; measure the next step instead"
NOTHING = "no allocation in the thread that entered the block; torch's profiler sees only this thread and those of autograd"


@dataclass(frozen=True)
class MeasuredLoop:
    """One run of a loop: its interval in seconds since the start of the step, and its peak bytes (relative, see `MeasuredStep`).

    The peak is None if bytes were not measured.
    """

    name: str
    stage: str
    half: str
    chunks: int
    start: float
    end: float
    peak_bytes: int | None = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def as_dict(self) -> dict[str, Any]:
        """Convert the run to values that JSON can represent."""
        labels = {"name": self.name, "stage": self.stage, "half": self.half, "chunks": self.chunks}
        return {**labels, "begins": self.start, "ends": self.end, "peak_bytes": self.peak_bytes, "seconds": self.seconds}


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: at each of `moments`, `alive` holds the live bytes in excess of those at the start of the step.

    `unseen` explains why bytes were not measured, or only in part. The peaks are then None, because unmeasured is not zero.
    `compiled_seconds` is the time spent on compilation.
    """

    seconds: float
    moments: tuple[float, ...]
    alive: tuple[int, ...]
    loops: tuple[MeasuredLoop, ...]
    device: str
    unseen: str = ""
    compiled_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int | None:
        return None if self.unseen else max(self.alive, default=0)

    @cached_property
    def timeline(self) -> Timeline:
        """The step as a timeline, in the form that `explain` predicts."""
        loops = tuple(LoopTime(loop.name, loop.start, loop.end, loop.chunks, loop.chunks) for loop in self.loops)
        backward_start = next((loop.start for loop in self.loops if loop.half == "backward"), self.seconds)
        moments = () if self.unseen else (0.0, *self.moments)
        terms = {} if self.unseen else {"bytes since the start": (0, *self.alive)}
        course = MemoryTimeline("streamfx", moments, terms, backward_start, self.seconds, loops=loops)
        return Timeline((course.shortened(MAX_POINTS),), "the host's clock", MEASURED)


def measured(
    begin: int,
    end: int,
    moves: Sequence[tuple[int, int, str]],
    ran: Sequence[tuple[int, int, str, str, str, int]],
    unseen: str = "",
    compiled: Sequence[tuple[int, int]] = (),
) -> MeasuredStep:
    """Build a measured step. All moments are in nanoseconds.

    Args:
        begin: Start of the step.
        end: End of the step.
        moves: Allocations and frees: moment, bytes, kind of device.
        ran: Loops: begin, end, name, stage, graph (forward or backward) and chunks.
        unseen: Why some allocations are missing, if so. If `moves` has none at all, a default reason is used.
        compiled: Intervals of compilation.

    Bytes count allocations on the accelerator if there are any, else on the host.

    >>> found = measured(0, 10**9, [(10**8, 40, "cpu"), (9 * 10**8, -40, "cpu")], [(0, 5 * 10**8, "a", "layers.0", "forward", 4)])
    >>> found.peak_bytes, found.loops[0].seconds, found.loops[0].peak_bytes
    (40, 0.5, 40)
    """
    kinds = sorted({kind for _, _, kind in moves}, key=lambda kind: kind == "cpu")
    device = kinds[0] if kinds else "cpu"
    on_device = [(at, size) for at, size, kind in moves if kind == device and begin <= at <= end]
    moments, alive = [at for at, _ in on_device], list(accumulate(size for _, size in on_device))
    unseen = unseen or ("" if on_device else NOTHING)

    def seconds(moment: int, start: int = begin) -> float:
        """Return the seconds from `start` to a moment."""
        return (moment - start) / 1e9

    def highest(first: int, last: int) -> int | None:
        """Return the peak bytes in an interval, including those alive at its start; None if they are unknown."""
        low = bisect_left(moments, first)
        return None if unseen else max(alive[max(low - 1, 0) : bisect_right(moments, last)], default=0)

    loops = tuple(
        MeasuredLoop(name, stage, half, chunks, seconds(first), seconds(last), highest(first, last))
        for first, last, name, stage, half, chunks in ran
    )
    compiling = sum(seconds(last, first) for first, last in compiled)
    return MeasuredStep(seconds(end), tuple(map(seconds, moments)), tuple(alive), loops, device, unseen, compiling)


def table_of(step: MeasuredStep, predicted: int | None) -> Iterator[str]:
    """Yield the lines of a measured step: measured and predicted peak, and one line per group of similar loops."""
    in_loops = sum(loop.seconds for loop in step.loops)
    share = f", {_percent(in_loops, step.seconds)} of it in {counted(len(step.loops), 'loop')} over chunks" if step.loops else ""
    yield f"streamfx: a step of {in_seconds(step.seconds)}{share}"
    if step.compiled_seconds:
        yield COMPILED.format(seconds=in_seconds(step.compiled_seconds))
    prediction = "" if predicted is None else f"; {format_bytes(predicted)} were predicted for activations and gradients"
    peak = step.peak_bytes
    if peak is None:
        yield f"  memory   not measured: {step.unseen}{prediction}"
    else:
        yield f"  memory   {format_bytes(peak)} at the peak, in excess of the bytes alive before ({step.device}){prediction}"
    if not step.loops:
        yield f"  {NO_LOOPS}"
        return
    yield ""
    runs: dict[tuple[str, str], list[MeasuredLoop]] = {}  # the loops of one graph whose stage names differ only in a number
    for loop in step.loops:
        runs.setdefault((loop.half, unnumbered(loop.stage)), []).append(loop)
    rows = [HEADER, *(_table_row(run, step.seconds) for run in runs.values())]
    others = {"compiling": step.compiled_seconds} if step.compiled_seconds else {}
    others["outside of loops"] = max(step.seconds - in_loops - step.compiled_seconds, 0.0)
    for name, seconds in others.items():
        rows.append((name, "", "", "", in_seconds(seconds), _percent(seconds, step.seconds), ""))
    yield from table_lines(rows)


def _table_row(run: Sequence[MeasuredLoop], total: float) -> tuple[str, ...]:
    """Return the cells of similar loops: stages, graph, counts, time, share and peak."""
    names = list(dict.fromkeys(loop.stage for loop in (reversed(run) if run[0].half == "backward" else run)))
    seconds = sum(loop.seconds for loop in run)
    chunks = sum(loop.chunks for loop in run)
    peaks = [loop.peak_bytes for loop in run if loop.peak_bytes is not None]
    peak = format_bytes(max(peaks)) if peaks else "-"
    return joint_name(names), run[0].half, f"{len(run):,}", f"{chunks:,}", in_seconds(seconds), _percent(seconds, total), peak


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"


def as_plain(step: MeasuredStep, predicted: int | None) -> dict[str, Any]:
    """Convert a measured step to values that JSON can represent."""
    loops = [loop.as_dict() for loop in step.loops]
    return {
        "seconds": step.seconds,
        "compiled_seconds": step.compiled_seconds,
        "peak_bytes": step.peak_bytes,
        "predicted_peak_bytes": predicted,
        "unseen": step.unseen or None,
        "device": step.device,
        "loops": loops,
    }
