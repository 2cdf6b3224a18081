"""The memory timeline of a loop of which only a few chunks ran.

Chunks are divided into at most `MAX_GROUPS` groups of neighbors. Each group is represented by one chunk that ran,
stretched over the work of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamfx.cost.curve import Curve, Point, shortened
from streamfx.cost.work import Work

MAX_GROUPS = 16
POINTS_PER_GROUP = 12


@dataclass(frozen=True)
class SampledChunk:
    """A chunk that ran: its index, its work, and its points relative to the start of the loop."""

    chunk_index: int
    work: Work
    points: Sequence[Point]

    @property
    def peak(self) -> int:
        """The peak of the chunk above the start of the loop."""
        return max((point.total for point in self.points), default=0)


def curve_of_chunks(
    points_before: Sequence[Point], sampled: Sequence[SampledChunk], num_chunks: int, work_of: Callable[[range], Work]
) -> Curve:
    """Return the curve of a loop with `num_chunks` chunks, from the points of the sampled ones.

    `points_before` was recorded before the chunks; `work_of` returns the work of a range of chunks.
    """
    groups = chunk_groups(num_chunks)
    points, work_done = list(points_before), Work()
    for group in groups:
        chunk, work = _representative(group, sampled), work_of(group)
        points += _rescaled(chunk, work, work_done)
        work_done = work_done.plus(work)
    return Curve(tuple(points), (), work_done)


def chunk_groups(num_chunks: int) -> list[range]:
    """Return chunk indices in groups of about equal size; the first and the last chunk are separate."""
    if num_chunks <= MAX_GROUPS:
        return [range(chunk_index, chunk_index + 1) for chunk_index in range(num_chunks)]
    inner_chunks, inner_groups = num_chunks - 2, MAX_GROUPS - 2
    bounds = [1 + inner_chunks * group // inner_groups for group in range(inner_groups + 1)]
    return [range(1), *(range(*pair) for pair in pairwise(bounds)), range(num_chunks - 1, num_chunks)]


def _representative(group: range, sampled: Sequence[SampledChunk]) -> SampledChunk:
    """Return the sampled chunk that represents a group: in the group, the chunk with the highest peak, or else the nearest."""
    in_group = [chunk for chunk in sampled if chunk.chunk_index in group]
    if in_group:
        return max(in_group, key=lambda chunk: chunk.peak)
    middle = group[len(group) // 2]
    return min(sampled, key=lambda chunk: abs(chunk.chunk_index - middle))


def _rescaled(chunk: SampledChunk, work: Work, work_done: Work) -> Iterator[Point]:
    """Yield the points of a chunk, stretched over the work of its group; counters grow in proportion."""
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
