"""The memory timeline of a step: the live bytes, as a meter records them operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from streamfx.cost.work import NO_WORK, Work

MOST_POINTS = 4000  # of a curve that is kept
NOTHING: Mapping[str, int] = MappingProxyType({})


class Point(NamedTuple):
    """The live bytes by term after some work; they stay the same until the next point."""

    work: Work
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        """The live bytes of all categories."""
        return sum(self.terms.values())

    def above(self, work: Work, terms: Mapping[str, int]) -> Point:
        """Return the point shifted by some work and by some bytes."""
        names = self.terms if not terms else {**self.terms, **terms}  # in the order in which terms appeared
        return Point(self.work.plus(work), {name: self.terms.get(name, 0) + terms.get(name, 0) for name in names})


class LoopInterval(NamedTuple):
    """A loop in a curve: the work before its first and after its last chunk, its chunks, and the number of chunks drawn.

    Chunks that are not drawn are like their drawn neighbors.
    """

    name: str
    begins: Work
    ends: Work
    chunks: int
    drawn: int


@dataclass(frozen=True)
class Curve:
    """The timeline that a meter recorded; work is counted from its start. The backward graph starts at `turn`."""

    points: tuple[Point, ...] = ()
    loops: tuple[LoopInterval, ...] = ()
    work: Work = NO_WORK
    turn: Work | None = None

    @property
    def peak(self) -> int:
        """The peak of the live bytes."""
        return max((point.total for point in self.points), default=0)

    def above(self, work: Work, terms: Mapping[str, int] = NOTHING) -> Curve:
        """Return the curve shifted by some work and by some bytes."""
        loops = tuple(loop._replace(begins=loop.begins.plus(work), ends=loop.ends.plus(work)) for loop in self.loops)
        turn = None if self.turn is None else self.turn.plus(work)
        return Curve(tuple(point.above(work, terms) for point in self.points), loops, self.work.plus(work), turn)

    def then(self, other: Curve) -> Curve:
        """Append a curve whose work is counted from the same start."""
        turn = other.turn if self.turn is None else self.turn
        return Curve((*self.points, *other.points), (*self.loops, *other.loops), other.work, turn)

    def shortened(self, most: int = MOST_POINTS) -> Curve:
        """Return the curve with at most `most` points and the same peak."""
        return replace(self, points=shortened(self.points, most))


class Recorder:
    """Records the points of a meter."""

    def __init__(self) -> None:
        """Start without points and loops."""
        self.points: list[Point] = []
        self.loops: list[LoopInterval] = []

    def note(self, work: Work, live: Mapping[str, int], rise: Mapping[str, int] = NOTHING) -> None:
        """Record the live bytes after some work, plus `rise` above them."""
        terms = dict(live)
        for name, size in rise.items():
            terms[name] = terms.get(name, 0) + size
        self.points.append(Point(work, terms))

    def add(self, curve: Curve) -> None:
        """Append a curve that was recorded separately, with work counted from this recorder's start."""
        self.points += curve.points
        self.loops += curve.loops

    def take(self, begin: Work, end: Work) -> Curve:
        """Return the curve since `begin`, and restart with its last point."""
        final_point = self.points[-1:]
        minus_begin = Work().minus(begin)
        curve = Curve(shortened(self.points), tuple(self.loops), end).above(minus_begin)
        self.points, self.loops = [point._replace(work=end) for point in final_point], []
        return curve


def shortened(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Return at most `most` points: both ends, and the highest and the lowest of each group of neighbors.

    A maximum is dropped only if a neighbor is higher, so the peak stays.
    """
    if len(points) <= most:
        return tuple(points)
    return tuple(points[position] for position in standing_out([point.total for point in points], most))


def standing_out(totals: Sequence[int], most: int) -> list[int]:
    """Return at most `most` indices: both ends, and the highest and the lowest of each group of neighbors."""
    count = len(totals)
    if count <= most:
        return list(range(count))
    size = -(-2 * count // (most - 2))
    groups = (range(first, min(first + size, count)) for first in range(0, count, size))
    extremes = (pick(group, key=totals.__getitem__) for group in groups for pick in (max, min))
    return sorted({0, *extremes, count - 1})
