"""A step of many layers that are alike, put together of one of few: the stretch of some layers is repeated.

    forward    embed  0  1 | 2  3  head            backward    head  3  2 | 1  0  embed
                         ^ as often as layers are missing, each from where the last one ended

Whether a stretch may be repeated is seen in what was recorded: the stretch behind it is the same, byte by byte and FLOP by FLOP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamfx.cost.curve import Point
from streamfx.cost.eager_step import EagerHalf, EagerStep, WorkMark
from streamfx.cost.work import NO_WORK, Work


@dataclass(frozen=True)
class Repeat:
    """Of `count` layers those after the first `front` repeat with a period; the first `kept` are there, and stand for all."""

    front: int
    period: int
    kept: int
    count: int

    @property
    def copies(self) -> int:
        """Periods that are missing."""
        return (self.count - self.kept) // self.period


def step_of_all(few: EagerStep, repeat: Repeat) -> EagerStep | None:
    """The step of all layers, given that of those that are kept; None if layers do not repeat in what was recorded of them.

    FLOPs of layers by themselves are not known of it.
    """
    front, period = repeat.front, repeat.period
    places = [_places(few.forward, range(repeat.kept), [front, front + period, front + 2 * period])]
    halves = [few.forward]
    if few.backward is not None:
        ends = [front + 2 * period - 1, front + period - 1, front - 1]
        places.append(_places(few.backward, range(repeat.kept)[::-1], ends))
        halves.append(few.backward)
    made: list[EagerHalf] = []
    rise = Point(NO_WORK, {})
    for half, marks in zip(halves, places, strict=True):
        if marks is None or not _repeats(half, marks):
            return None
        found, rise = _of_all(half, marks, rise, repeat.copies)
        made.append(found)
    return EagerStep(made[0], made[1] if len(made) > 1 else None)


def _places(half: EagerHalf, order: range, layers: list[int]) -> list[WorkMark] | None:
    """When the turns of some layers came; None unless all layers had theirs once, and in order."""
    marks = [(number, mark) for number, mark in half.marks if number in order]
    if [number for number, _ in marks] != list(order):
        return None
    return [dict(marks)[layer] for layer in layers]


def _repeats(half: EagerHalf, marks: list[WorkMark]) -> bool:
    """Whether what lies between the first two marks is what lies between the last two."""
    first, second, third = marks
    one, other = half.points[first.position : second.position], half.points[second.position : third.position]
    start, middle, end = (_at(half, mark) for mark in marks)
    if len(one) != len(other) or _between(start, middle) != _between(middle, end):
        return False
    return all(_between(start, a) == _between(middle, b) for a, b in zip(one, other, strict=True))


def _at(half: EagerHalf, mark: WorkMark) -> Point:
    """How things stood at a mark."""
    terms = half.points[mark.position - 1].terms if mark.position else {}
    return Point(mark.work, terms)


def _between(before: Point, after: Point) -> tuple[Work, Mapping[str, int]]:
    """What was done, and which bytes came and went."""
    names = {*before.terms, *after.terms}
    changes = {name: after.terms.get(name, 0) - before.terms.get(name, 0) for name in names}
    return after.work.minus(before.work), {name: change for name, change in changes.items() if change}


def _of_all(half: EagerHalf, marks: list[WorkMark], rise: Point, copies: int) -> tuple[EagerHalf, Point]:
    """The half with a stretch repeated, begun with so much more done and alive; and how much more it is at its end."""
    first, second, _ = marks
    each = Point(*_between(_at(half, first), _at(half, second)))
    stretch = half.points[first.position : second.position]
    points = [point.above(rise.work, rise.terms) for point in half.points[: second.position]]
    here = rise
    for _ in range(copies):
        here = here.above(each.work, each.terms)
        points += [point.above(here.work, here.terms) for point in stretch]
    points += [point.above(here.work, here.terms) for point in half.points[second.position :]]
    return EagerHalf(tuple(points), half.work.plus(here.work)), here
