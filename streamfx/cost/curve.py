"""The memory timeline of a step: the live bytes, as a meter records them operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from streamfx.cost.work import NO_WORK, Work

MAX_POINTS = 4000  # of a curve that is kept
NOTHING: Mapping[str, int] = MappingProxyType({})


class Point(NamedTuple):
    """The live bytes of each category (`terms`) after some work; they stay the same until the next point."""

    work: Work
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        """The live bytes of all categories."""
        return sum(self.terms.values())

    def shifted(self, work: Work, terms: Mapping[str, int]) -> Point:
        """Return the point shifted by some work and by some bytes."""
        names = self.terms if not terms else {**self.terms, **terms}  # in the order in which terms appeared
        return Point(self.work.plus(work), {name: self.terms.get(name, 0) + terms.get(name, 0) for name in names})


class LoopInterval(NamedTuple):
    """A loop in a curve: the work before its first and after its last chunk, and the number of its chunks.

    Only `sampled_chunks` of them have points in the curve; each represents its neighbors.
    """

    name: str
    start: Work
    end: Work
    chunks: int
    sampled_chunks: int


@dataclass(frozen=True)
class Curve:
    """The timeline that a meter recorded. Work is counted from its start; the backward graph starts at `backward_start`."""

    points: tuple[Point, ...] = ()
    loops: tuple[LoopInterval, ...] = ()
    work: Work = NO_WORK
    backward_start: Work | None = None

    @property
    def peak(self) -> int:
        """The peak of the live bytes."""
        return max((point.total for point in self.points), default=0)

    def shifted(self, work: Work, terms: Mapping[str, int] = NOTHING) -> Curve:
        """Return the curve shifted by some work and by some bytes."""
        loops = tuple(loop._replace(start=loop.start.plus(work), end=loop.end.plus(work)) for loop in self.loops)
        backward_start = None if self.backward_start is None else self.backward_start.plus(work)
        return Curve(tuple(point.shifted(work, terms) for point in self.points), loops, self.work.plus(work), backward_start)

    def concatenated(self, other: Curve) -> Curve:
        """Return this curve followed by a later one, whose work is counted from the same start."""
        backward_start = other.backward_start if self.backward_start is None else self.backward_start
        return Curve((*self.points, *other.points), (*self.loops, *other.loops), other.work, backward_start)

    def shortened(self, max_points: int = MAX_POINTS) -> Curve:
        """Return the curve with at most `max_points` points and the same peak."""
        return replace(self, points=shortened(self.points, max_points))


class Recorder:
    """Records the points of a meter."""

    def __init__(self) -> None:
        """Start without points and loops."""
        self.points: list[Point] = []
        self.loops: list[LoopInterval] = []

    def record(self, work: Work, live: Mapping[str, int], rise: Mapping[str, int] = NOTHING) -> None:
        """Record the live bytes after some work, plus `rise` above them."""
        terms = dict(live)
        for name, size in rise.items():
            terms[name] = terms.get(name, 0) + size
        self.points.append(Point(work, terms))

    def add(self, curve: Curve) -> None:
        """Append a curve that was recorded separately, with work counted from this recorder's start."""
        self.points += curve.points
        self.loops += curve.loops

    def take_curve(self, begin: Work, end: Work) -> Curve:
        """Return the curve since `begin`, and restart with the last point."""
        final_point = self.points[-1:]
        minus_begin = Work().minus(begin)
        curve = Curve(shortened(self.points), tuple(self.loops), end).shifted(minus_begin)
        self.points, self.loops = [point._replace(work=end) for point in final_point], []
        return curve


def shortened(points: Sequence[Point], max_points: int = MAX_POINTS) -> tuple[Point, ...]:
    """Return at most `max_points` points: both ends, and the highest and the lowest of each group of neighbors.

    A maximum is dropped only if a neighbor is higher, so the peak stays.
    """
    if len(points) <= max_points:
        return tuple(points)
    return tuple(points[i] for i in extreme_indices([point.total for point in points], max_points))


def extreme_indices(totals: Sequence[int], max_points: int) -> list[int]:
    """Return at most `max_points` indices: both ends, and the highest and the lowest of each group of neighbors."""
    num_points = len(totals)
    if num_points <= max_points:
        return list(range(num_points))
    size = -(-2 * num_points // (max_points - 2))
    groups = (range(start, min(start + size, num_points)) for start in range(0, num_points, size))
    extremes = (pick(group, key=totals.__getitem__) for group in groups for pick in (max, min))
    return sorted({0, *extremes, num_points - 1})
