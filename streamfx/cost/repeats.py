"""The cost of a step of many equal layers, from the recorded step of a few: the segment of some layers is repeated.

    forward    embed  0  1 | 2  3  head            backward    head  3  2 | 1  0  embed
                         ^ as often as layers are missing, each from where the last one ended

A segment may be repeated if the recorded segment after it is equal, byte by byte and FLOP by FLOP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamfx.cost.curve import Point
from streamfx.cost.eager_step import EagerPass, EagerStep, WorkMark
from streamfx.cost.work import NO_WORK, Work


@dataclass(frozen=True)
class Repeat:
    """A repetition of layers. A model has `count` layers; of these, the first `kept` layers were run.

    The first `front` layers are different; the layers after them repeat every `period` layers.
    """

    front: int
    period: int
    kept: int
    count: int

    @property
    def copies(self) -> int:
        """The number of missing periods."""
        return (self.count - self.kept) // self.period


def step_of_all(step_of_few: EagerStep, repeat: Repeat) -> EagerStep | None:
    """Return the step of all layers, from the step of the kept layers; None if the recorded layers do not repeat.

    The FLOPs of the layers alone are unknown.
    """
    front, period = repeat.front, repeat.period
    marks_by_pass = [_layer_marks(step_of_few.forward, range(repeat.kept), [front, front + period, front + 2 * period])]
    passes = [step_of_few.forward]
    if step_of_few.backward is not None:
        ends = [front + 2 * period - 1, front + period - 1, front - 1]
        marks_by_pass.append(_layer_marks(step_of_few.backward, range(repeat.kept)[::-1], ends))
        passes.append(step_of_few.backward)
    results: list[EagerPass] = []
    shift = Point(NO_WORK, {})
    for eager_pass, marks in zip(passes, marks_by_pass, strict=True):
        if marks is None or not _repeats(eager_pass, marks):
            return None
        result, shift = _with_copies(eager_pass, marks, shift, repeat.copies)
        results.append(result)
    return EagerStep(results[0], results[1] if len(results) > 1 else None)


def _layer_marks(eager_pass: EagerPass, order: range, layers: list[int]) -> list[WorkMark] | None:
    """Return the marks of `layers`; None unless each layer in `order` has exactly one mark, in this order."""
    marks = [(layer, mark) for layer, mark in eager_pass.marks if layer in order]
    if [layer for layer, _ in marks] != list(order):
        return None
    return [dict(marks)[layer] for layer in layers]


def _repeats(eager_pass: EagerPass, marks: list[WorkMark]) -> bool:
    """Return whether the segment between the first two marks equals the segment between the last two."""
    first, second, third = marks
    first_segment = eager_pass.points[first.num_points : second.num_points]
    second_segment = eager_pass.points[second.num_points : third.num_points]
    start, middle, end = (_state_at(eager_pass, mark) for mark in marks)
    if len(first_segment) != len(second_segment) or _change_between(start, middle) != _change_between(middle, end):
        return False
    return all(
        _change_between(start, a) == _change_between(middle, b) for a, b in zip(first_segment, second_segment, strict=True)
    )


def _state_at(eager_pass: EagerPass, mark: WorkMark) -> Point:
    """Return the work and the live bytes at a mark."""
    terms = eager_pass.points[mark.num_points - 1].terms if mark.num_points else {}
    return Point(mark.work, terms)


def _change_between(start: Point, end: Point) -> tuple[Work, Mapping[str, int]]:
    """Return the work done and the changes of the live bytes between two points."""
    names = {*start.terms, *end.terms}
    changes = {name: end.terms.get(name, 0) - start.terms.get(name, 0) for name in names}
    return end.work.minus(start.work), {name: change for name, change in changes.items() if change}


def _with_copies(eager_pass: EagerPass, marks: list[WorkMark], shift_at_start: Point, num_copies: int) -> tuple[EagerPass, Point]:
    """Repeat the segment between the first two marks `num_copies` times.

    The pass is shifted by `shift_at_start`. Return (the new pass, the shift at its end).
    """
    first, second, _ = marks
    period_change = Point(*_change_between(_state_at(eager_pass, first), _state_at(eager_pass, second)))
    segment = eager_pass.points[first.num_points : second.num_points]
    points = [point.shifted(shift_at_start.work, shift_at_start.terms) for point in eager_pass.points[: second.num_points]]
    shift = shift_at_start
    for _ in range(num_copies):
        shift = shift.shifted(period_change.work, period_change.terms)
        points += [point.shifted(shift.work, shift.terms) for point in segment]
    points += [point.shifted(shift.work, shift.terms) for point in eager_pass.points[second.num_points :]]
    return EagerPass(tuple(points), eager_pass.work.plus(shift.work)), shift
