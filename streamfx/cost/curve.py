"""How the bytes that are alive change along a step: what a meter records of it, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from streamfx.cost.work import NO_WORK, Work

MOST_POINTS = 4000  # of a curve that is kept
NOTHING: Mapping[str, int] = MappingProxyType({})


class Point(NamedTuple):
    """The bytes alive by term after some work; they stay so until the next point."""

    work: Work
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def above(self, work: Work, terms: Mapping[str, int]) -> Point:
        """The same after so much more work, beside so many more bytes."""
        names = self.terms if not terms else {**self.terms, **terms}  # in the order in which terms appeared
        return Point(self.work.plus(work), {name: self.terms.get(name, 0) + terms.get(name, 0) for name in names})


class LoopInterval(NamedTuple):
    """A loop in a curve: the work before its first chunk and after its last, its chunks, and how many of them are drawn.

    The others are like those that are drawn: a drawn one stands for its neighbours.
    """

    name: str
    begins: Work
    ends: Work
    chunks: int
    drawn: int


@dataclass(frozen=True)
class Curve:
    """What a meter recorded from some moment on; work is counted from there. The backward half begins at `turn`."""

    points: tuple[Point, ...] = ()
    loops: tuple[LoopInterval, ...] = ()
    work: Work = NO_WORK
    turn: Work | None = None

    @property
    def peak(self) -> int:
        return max((point.total for point in self.points), default=0)

    def above(self, work: Work, terms: Mapping[str, int] = NOTHING) -> Curve:
        """The same after so much more work, beside so many more bytes."""
        loops = tuple(loop._replace(begins=loop.begins.plus(work), ends=loop.ends.plus(work)) for loop in self.loops)
        turn = None if self.turn is None else self.turn.plus(work)
        return Curve(tuple(point.above(work, terms) for point in self.points), loops, self.work.plus(work), turn)

    def then(self, other: Curve) -> Curve:
        """This curve and one that follows, whose work is counted from the same moment."""
        turn = other.turn if self.turn is None else self.turn
        return Curve((*self.points, *other.points), (*self.loops, *other.loops), other.work, turn)

    def shortened(self, most: int = MOST_POINTS) -> Curve:
        return replace(self, points=shortened(self.points, most))


class Recorder:
    """Keeps what a meter tells."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.loops: list[LoopInterval] = []

    def note(self, work: Work, live: Mapping[str, int], rise: Mapping[str, int] = NOTHING) -> None:
        """So many bytes are alive after some work, and `rise` above them."""
        terms = dict(live)
        for name, size in rise.items():
            terms[name] = terms.get(name, 0) + size
        self.points.append(Point(work, terms))

    def add(self, curve: Curve) -> None:
        """A curve that was recorded apart, whose work is counted from this recorder's beginning."""
        self.points += curve.points
        self.loops += curve.loops

    def take(self, begin: Work, end: Work) -> Curve:
        """What was recorded since `begin`; what follows begins with the last moment of it."""
        last = self.points[-1:]
        back = Work().minus(begin)
        found = Curve(shortened(self.points), tuple(self.loops), end).above(back)
        self.points, self.loops = [point._replace(work=end) for point in last], []
        return found


def shortened(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most so many points: of neighbours the highest and the lowest, and both ends.

    No maximum is lost but to a higher one beside it, and the peak stays.
    """
    if len(points) <= most:
        return tuple(points)
    return tuple(points[position] for position in standing_out([point.total for point in points], most))


def standing_out(totals: Sequence[int], most: int) -> list[int]:
    """Positions of at most so many: of neighbours the highest and the lowest, and both ends."""
    count = len(totals)
    if count <= most:
        return list(range(count))
    size = -(-2 * count // (most - 2))
    parts = (range(first, min(first + size, count)) for first in range(0, count, size))
    inner = (pick(part, key=totals.__getitem__) for part in parts for pick in (max, min))
    return sorted({0, *inner, count - 1})
