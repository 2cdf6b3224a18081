"""The timeline of a loop of which only a few chunks ran: they are repeated in place of the others, which rise as high.

In a loop with many chunks, some are drawn, each for a group of neighbors and as long as the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamfx.cost.curve import Curve, Point, shortened
from streamfx.cost.work import Work

MOST_GROUPS = 16  # groups of chunks in a loop
POINTS_PER_GROUP = 12


@dataclass(frozen=True)
class SampledChunk:
    """A chunk that ran: its index, its own work, and its points relative to the start of the loop."""

    position: int
    work: Work
    points: Sequence[Point]

    @property
    def highest(self) -> int:
        """The peak of the chunk above the start of the loop."""
        return max((point.total for point in self.points), default=0)


def curve_of_chunks(
    points_before: Sequence[Point], sampled: Sequence[SampledChunk], count: int, work_of: Callable[[range], Work]
) -> Curve:
    """Return the curve of a loop with `count` chunks.

    `points_before` was recorded before the chunks; `work_of` returns the work of a range of chunks.
    """
    groups = groups_of(count)
    points, work_done = list(points_before), Work()
    for group in groups:
        chunk, work = _representative(group, sampled), work_of(group)
        points += _rescaled(chunk, work, work_done)
        work_done = work_done.plus(work)
    return Curve(tuple(points), (), work_done)


def groups_of(count: int) -> list[range]:
    """Return chunk indices in groups of about equal size; the first and the last chunk are separate."""
    if count <= MOST_GROUPS:
        return [range(position, position + 1) for position in range(count)]
    inner_chunks, inner_groups = count - 2, MOST_GROUPS - 2
    bounds = [1 + inner_chunks * group // inner_groups for group in range(inner_groups + 1)]
    return [range(1), *(range(*pair) for pair in pairwise(bounds)), range(count - 1, count)]


def _representative(group: range, sampled: Sequence[SampledChunk]) -> SampledChunk:
    """Return the highest chunk that ran in a group, or the nearest one."""
    in_group = [chunk for chunk in sampled if chunk.position in group]
    if in_group:
        return max(in_group, key=lambda chunk: chunk.highest)
    middle = group[len(group) // 2]
    return min(sampled, key=lambda chunk: abs(chunk.position - middle))


def _rescaled(chunk: SampledChunk, work: Work, work_done: Work) -> Iterator[Point]:
    """Stretch the points of a chunk over the work of a group."""
    begin = chunk.points[0].work if chunk.points else Work()
    for point in shortened(chunk.points, POINTS_PER_GROUP):
        counters = zip(point.work.minus(begin), chunk.work, work, strict=True)
        yield Point(
            work_done.plus(
                Work(
                    *(
                        group_total * min(at_point, chunk_total) // chunk_total if chunk_total else 0
                        for at_point, chunk_total, group_total in counters
                    )
                )
            ),
            point.terms,
        )
