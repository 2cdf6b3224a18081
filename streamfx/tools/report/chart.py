"""Convert a timeline to the shapes of a plot without its labels, for a template to draw and to stretch to any width.

A timeline has the bytes alive at each moment of a step, by *memory category* (keys, gradients, ...). It has one *course* for each
*way* of running the step: streamfx first, then baselines such as eager.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from streamfx.budget import format_bytes
from streamfx.cost.categories import (
    BETWEEN_GRAPHS,
    CHUNK,
    GRADIENTS,
    INPUTS,
    KEY_GRADIENTS,
    KEYS,
    LOSS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    STAGE_INPUTS,
    STATES,
    STREAM_GRADIENT,
    WEIGHTS,
)
from streamfx.tools.report.page import Frontier
from streamfx.tools.report.text import in_seconds
from streamfx.tools.report.timeline import LoopTime, MemoryTimeline, Timeline

WIDTH = 868  # of a plot: all coordinates are in it, and in the plot's height
MAX_MOMENTS = 1400  # per chart: no chart is wider than this many pixels
TICKS = 5
MAX_PEAK_RATIO = 1.5  # to the highest peak compared: a baseline with a higher peak is cut off
MAX_TIME_RATIO = 4  # to the fastest plan of a frontier
COLOURS = (
    *(PARAMETERS, OPTIMIZER, INPUTS, GRADIENTS, STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, CHUNK, LOSS, STATES),
    *(WEIGHTS, BETWEEN_GRAPHS, OTHER),
)
COURSE_COLOURS = 6  # in the style sheet, for the ways of running a step
SPARE_COLOURS = 6  # in the style sheet, for memory categories without a fixed color
MIN_BAR_WIDTH = 0.5


@dataclass(frozen=True)
class Shape:
    """An area or a line for one memory category or baseline; `colour` is the index of its color in the style sheet."""

    name: str
    colour: int
    path: str


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: its coordinate, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class LoopBar:
    """A bar for a loop under the chart; odd bars have another color, to tell neighbors apart."""

    x: float
    width: float
    title: str
    is_odd: bool


@dataclass(frozen=True)
class ChartMark:
    """A labeled point of the chart; `colour` is that of the course it belongs to."""

    x: float
    y: float
    label: str
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """Shapes from back to front, ticks of both axes, marks at peaks, and bars of loops (`blocks`).

    `height`: of the plot, the y coordinate of zero bytes. `backward_start`: the x coordinate at which the backward pass starts;
    None without one. Courses in `beyond` are cut off at the top.
    """

    height: int
    shapes: tuple[Shape, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    backward_start: float | None
    marks: tuple[ChartMark, ...]
    blocks: tuple[LoopBar, ...] = ()
    beyond: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Scale:
    """Maps seconds and bytes to coordinates in the plot, whose axes end at `seconds` and `max_bytes`."""

    seconds: float
    max_bytes: int
    height: int

    def x(self, seconds: float) -> float:
        return WIDTH * (seconds / self.seconds if self.seconds else 0.0)

    def y(self, size: float) -> float:
        return self.height * (1 - size / self.max_bytes)


def stacked_chart(course: MemoryTimeline, height: int = 300) -> Chart:
    """Return a chart of one way of running a step: live bytes stacked by memory category, and its loops below."""
    shortened = course.shortened(MAX_MOMENTS)
    scale = Scale(course.end, axis_limit(course.peak_bytes), height)
    totals = [0] * len(shortened.seconds)
    shapes = []
    for name, sizes in shortened.terms.items():
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        shapes.append(Shape(name, colour_of(name, tuple(shortened.terms)), area(shortened.seconds, totals, course.end, scale)))
    blocks = tuple(_loop_bars(course.loops, scale))
    return replace(_chart(scale, shapes[::-1], [course]), blocks=blocks)


def comparison_chart(timeline: Timeline, height: int = 210) -> Chart:
    """Return a chart of the total bytes of all ways of running a step on one scale, the streamed one in front.

    The scale fits the streamed step and the first baseline; baselines far above these are cut off.
    """
    compared = timeline.courses[:2]
    compared_peak = max(course.peak_bytes for course in compared)
    highest_peak = max(course.peak_bytes for course in timeline.courses)
    shown_peak = highest_peak if highest_peak <= MAX_PEAK_RATIO * compared_peak else compared_peak
    scale = Scale(max(course.end for course in timeline.courses), axis_limit(shown_peak), height)
    shapes = []
    for index, course in enumerate(timeline.courses):
        shortened = course.shortened(MAX_MOMENTS)
        shapes.append(Shape(course.way, index % COURSE_COLOURS, area(shortened.seconds, shortened.totals, course.end, scale)))
    beyond = frozenset(course.way for course in timeline.courses if course.peak_bytes > scale.max_bytes)
    return replace(_chart(scale, shapes[::-1], timeline.courses), beyond=beyond)


def frontier_chart(frontier: Frontier, colours: Mapping[str, int], height: int = 210) -> Chart:
    """Return a chart of plans by time and bytes, a mark for each, with a line of the time that each budget allows.

    `colours`: of the other points, by name; 0 is that of the plans. The time axis does not begin at zero. Plans of much more time
    than the fastest are omitted; baselines of much more time or memory than the plans are `beyond` it.
    """
    most_seconds = MAX_TIME_RATIO * min(plan.seconds for plan in frontier.plans)
    plans = [plan for plan in frontier.plans if plan.seconds <= most_seconds]
    most_bytes = MAX_PEAK_RATIO * plans[-1].peak_bytes
    shown = [point for point in frontier.others if point.peak_bytes <= most_bytes and point.seconds <= most_seconds]
    times = [point.seconds for point in (*plans, *shown)]
    margin = 0.05 * (max(times) - min(times)) or 0.05 * max(times)
    start, end = max(0.0, min(times) - margin), max(times) + margin
    scale = Scale(end - start, axis_limit(max(point.peak_bytes for point in (*plans, *shown))), height)
    corners = [(scale.x(point.seconds - start), scale.y(point.peak_bytes)) for point in plans]
    line = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}" + "".join(f"V{y:.1f}H{x:.1f}" for x, y in corners[1:])
    marks = (
        ChartMark(
            scale.x(point.seconds - start),
            scale.y(point.peak_bytes),
            f"{point.name}: {format_bytes(point.peak_bytes)}, {in_seconds(point.seconds)}",
            colour,
        )
        for point, colour in (*((point, colours[point.name]) for point in shown), *((point, 0) for point in plans))
    )
    beyond = frozenset(point.name for point in frontier.others if point not in shown)
    ticks = tuple(Tick(scale.x(at - start), label) for at, label in _second_ticks(start, end))
    return Chart(height, (Shape("plans", 0, line),), ticks, _byte_ticks(scale), None, tuple(marks), beyond=beyond)


def _second_ticks(start: float, end: float) -> Iterator[tuple[float, str]]:
    """Yield the ticks of an axis of seconds between two moments, with labels of all significant digits.

    >>> [label for _, label in _second_ticks(3.42, 3.58)], [label for _, label in _second_ticks(0.0031, 0.0094)]
    (['3.45 s', '3.5 s', '3.55 s'], ['4 ms', '6 ms', '8 ms'])
    """
    distances = _tick_seconds(end - start)
    distance = distances[1] if len(distances) > 1 else end - start
    unit, size = next((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if end >= size or unit == "us")
    for index in range(math.ceil(start / distance), math.floor(end / distance) + 1):
        yield index * distance, f"{round(index * distance / size, 9):g} {unit}"


def _byte_ticks(scale: Scale) -> tuple[Tick, ...]:
    """Return the ticks of the axis of bytes."""
    return tuple(Tick(scale.y(size), _tick_text(size)) for size in range(0, scale.max_bytes + 1, _tick_distance(scale.max_bytes)))


def _chart(scale: Scale, shapes: Sequence[Shape], marked: Sequence[MemoryTimeline]) -> Chart:
    """Return a chart with these shapes, with axes for `scale`, and with a mark at each peak of `marked` that is within the scale.

    The first course is the streamed step, whose backward pass is also marked.
    """
    streamed = marked[0]
    backward_start = scale.x(streamed.backward_start) if streamed.backward_start < streamed.end else None
    xs = tuple(Tick(scale.x(at), in_seconds(at) if at else "0 s") for at in _tick_seconds(scale.seconds))
    labels = {course.way: f"{course.way}: {format_bytes(course.peak_bytes)}" for course in marked}
    marks = tuple(
        ChartMark(scale.x(course.seconds[course.peak]), scale.y(course.peak_bytes), labels[course.way], index % COURSE_COLOURS)
        for index, course in enumerate(marked)
        if course.seconds and course.peak_bytes <= scale.max_bytes
    )
    return Chart(scale.height, tuple(shapes), xs, _byte_ticks(scale), backward_start, marks)


def area(seconds: Sequence[float], sizes: Sequence[int], end: float, scale: Scale) -> str:
    """Return the SVG path of the area under bytes over time: `sizes[i]` from `seconds[i]` to the next moment or the end.

    Coordinates that do not change between two moments are omitted.
    """
    commands, last_point = [f"M{scale.x(0):.1f} {scale.y(0):.1f}"], ("", "")
    for at, size in zip(seconds, sizes, strict=True):
        x, y = f"{scale.x(at):.1f}", f"{scale.y(size):.1f}"
        commands += ([f"H{x}"] if x != last_point[0] else []) + ([f"V{y}"] if y != last_point[1] else [])
        last_point = x, y
    return "".join([*commands, f"H{scale.x(end):.1f}", f"V{scale.y(0):.1f}", "Z"])


def colour_of(term: str, terms: Sequence[str]) -> int:
    """Return the color index of category `term`: its fixed color, or one of the spare colors, by its order in `terms`."""
    if term in COLOURS:
        return COLOURS.index(term)
    others = [name for name in terms if name not in COLOURS]
    return len(COLOURS) + others.index(term) % SPARE_COLOURS


def axis_limit(size: int) -> int:
    """Return the upper limit of a byte axis: the first tick above a size, with room for a label.

    >>> axis_limit(1000), axis_limit(5 * 2**30) // 2**30
    (1280, 6)
    """
    step = _tick_distance(max(int(size * 1.08), 1))
    return -(-int(size * 1.08 + 1) // step) * step


def _tick_distance(most: int) -> int:
    """Return the distance between two ticks of an axis up to `most` bytes: a round multiple of a power of 1024.

    It is the smallest with which `TICKS` ticks reach the end of the axis.
    """
    unit = 1
    while most >= 1024 * unit:
        unit *= 1024
    factors = (1, 2, 5, 10, 20, 50, 100, 200, 256, 512)
    small = [unit // 8, unit // 4, unit // 2] if unit > 1 else []
    return next(step for step in (*small, *(unit * factor for factor in factors)) if step * TICKS >= most)


def _tick_text(size: int) -> str:
    """Format a tick's bytes with all significant digits.

    >>> _tick_text(0), _tick_text(1280 * 2**20), _tick_text(3 * 2**18)
    ('0', '1.25 GiB', '768 KiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):g} {unit}"
    return f"{size} bytes" if size else "0"


def _tick_seconds(seconds: float) -> list[float]:
    """Return the ticks of an axis up to `seconds`, from 0 on, with a distance of 1, 2 or 5 times a power of ten."""
    if seconds <= 0:
        return [0.0]
    power = 10.0**-20
    while True:
        for factor in (1, 2, 5):
            if power * factor * (TICKS + 1) >= seconds:
                distance = power * factor
                return [tick_index * distance for tick_index in range(int(seconds / distance) + 1)]
        power *= 10


def _loop_bars(loops: Sequence[LoopTime], scale: Scale) -> Iterator[LoopBar]:
    """Yield a bar per loop, with the loop's name, number of chunks, and seconds as its title."""
    for i, loop in enumerate(loops):
        x = scale.x(loop.start)
        sampled = f", {loop.sampled_chunks} of them drawn" if loop.sampled_chunks < loop.chunks else ""
        duration = in_seconds(loop.end - loop.start)
        width = max(scale.x(loop.end) - x, MIN_BAR_WIDTH)
        yield LoopBar(x, width, f"{loop.name}: {loop.chunks:,} chunks{sampled}, {duration}", i % 2 == 1)
