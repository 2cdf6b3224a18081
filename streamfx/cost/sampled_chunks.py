"""The curve of a loop of which few chunks ran: those that ran are repeated where others would have risen as high.

Of a loop with many chunks some are drawn, each for a group of neighbours that takes as long as they all do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamfx.cost.curve import Curve, Point, shortened
from streamfx.cost.work import Work

MOST_TEETH = 16  # groups of chunks of a loop
POINTS_OF_TOOTH = 12


@dataclass(frozen=True)
class SampledChunk:
    """A chunk that ran: its position among all, the work of it alone, and its points, counted from the loop's beginning."""

    position: int
    work: Work
    points: Sequence[Point]

    @property
    def highest(self) -> int:
        return max((point.total for point in self.points), default=0)


def curve_of_chunks(before: Sequence[Point], ran: Sequence[SampledChunk], count: int, work_of: Callable[[range], Work]) -> Curve:
    """The curve of a loop with `count` chunks; `before` was recorded ahead of them, `work_of` is what a range of them takes."""
    groups = groups_of(count)
    points, done = list(before), Work()
    for group in groups:
        shown, work = _stand_in(group, ran), work_of(group)
        points += _stretched(shown, work, done)
        done = done.plus(work)
    return Curve(tuple(points), (), done)


def groups_of(count: int) -> list[range]:
    """Positions of chunks, in groups of about equal size; the first and the last chunk stand alone."""
    if count <= MOST_TEETH:
        return [range(position, position + 1) for position in range(count)]
    inner, parts = count - 2, MOST_TEETH - 2
    bounds = [1 + inner * part // parts for part in range(parts + 1)]
    return [range(1), *(range(*pair) for pair in pairwise(bounds)), range(count - 1, count)]


def _stand_in(group: range, ran: Sequence[SampledChunk]) -> SampledChunk:
    """The highest of those that ran in a group, or the nearest one."""
    own = [one for one in ran if one.position in group]
    if own:
        return max(own, key=lambda one: one.highest)
    middle = group[len(group) // 2]
    return min(ran, key=lambda one: abs(one.position - middle))


def _stretched(shown: SampledChunk, work: Work, done: Work) -> Iterator[Point]:
    """The points of a chunk, over the time that a group takes."""
    begin = shown.points[0].work if shown.points else Work()
    for point in shortened(shown.points, POINTS_OF_TOOTH):
        parts = zip(point.work.minus(begin), shown.work, work, strict=True)
        yield Point(done.plus(Work(*(to * min(part, of) // of if of else 0 for part, of, to in parts))), point.terms)
