"""Group the rectangles that constant writes cover into strips, each with one interval of columns per row.

The bounds of a strip's intervals are a line of the row index, if one fits: a constant, a slope, or a staircase of blocks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

END = sys.maxsize  # end of a dimension whose size is only known at run time
MOST = 8  # intervals per row: each one costs a comparison over the full buffer

Interval: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Strip:
    """A constant in one interval of columns per row, as bands ((first row, end row), (first column, end column))."""

    number: float
    bands: list[tuple[Interval, Interval]]

    @property
    def rows(self) -> Interval:
        """Return the first row and the end row of all bands."""
        return self.bands[0][0][0], self.bands[-1][0][1]

    def edge(self, side: int) -> list[Interval]:
        """Return (row, column) pairs of each interval's start (0) or end (1); of unbounded rows only the first."""
        ends = ((begin, begin + 1 if end == END else end, columns[side]) for (begin, end), columns in self.bands)
        return [(row, column) for begin, end, column in ends for row in range(begin, end)]


@dataclass(frozen=True)
class ColumnLine:
    """Columns as a function of the row: `factor` more per `block` rows; the first block is shorter by `shift` rows."""

    factor: int
    offset: int
    block: int = 1
    shift: int = 0

    def at(self, row: int) -> int:
        """Return the column for a row."""
        return (row + self.shift) // self.block * self.factor + self.offset


def strips_of(boxes: Sequence[tuple[Interval, Interval, float]], end: int) -> list[Strip]:
    """Return the constants that the last write to each element leaves, grouped by value and order within the row."""
    bounds = sorted({bound for rows, _, _ in boxes for bound in rows})
    number_of_bound = {bound: i for i, bound in enumerate(bounds)}
    writes_by_band: list[list[tuple[Interval, float]]] = [[] for _ in bounds]
    for rows, columns, value in boxes:
        for i in range(number_of_bound[rows[0]], number_of_bound[rows[1]]):
            writes_by_band[i].append((columns, value))
    intervals_by_value: dict[str, list[list[tuple[Interval, Interval]]]] = defaultdict(list)
    for rows, writes in zip(pairwise(bounds), writes_by_band, strict=False):
        band_intervals: dict[str, list[tuple[Interval, Interval]]] = defaultdict(list)
        for columns, key in _remaining(writes):
            band_intervals[key].append((rows, columns))
        for key, intervals in band_intervals.items():
            intervals_by_value[key].append(intervals)
    values = {repr(value): value for _, _, value in boxes}
    return [Strip(values[key], part) for key, by_row in intervals_by_value.items() for part in _grouped_strips(by_row, end)]


def _grouped_strips(by_row: list[list[tuple[Interval, Interval]]], end: int) -> list[list[tuple[Interval, Interval]]]:
    """Group intervals into few strips: one if each row has one interval with bounds on lines; else by touched side."""
    if all(len(intervals) == 1 for intervals in by_row):
        runs = _adjacent_runs([intervals[0] for intervals in by_row])
        if all(fitting_line(Strip(0, run).edge(side), end) is not None for run in runs for side in (0, 1)):
            return runs
    by_touched_side: dict[Any, list[tuple[Interval, Interval]]] = defaultdict(list)
    for intervals in by_row:
        for i, (rows, columns) in enumerate(intervals):
            touched = (columns[0] == 0, columns[1] == end)
            by_touched_side[touched, 0 if any(touched) else i].append((rows, columns))
    return [run for bands in by_touched_side.values() for run in _adjacent_runs(bands)]


def _remaining(writes: list[tuple[Interval, float]]) -> Iterator[tuple[Interval, str]]:
    """Yield the intervals that remain after all writes to one row, with the constant of each."""
    cuts = sorted({bound for columns, _ in writes for bound in columns})
    index_of_cut = {bound: i for i, bound in enumerate(cuts)}
    value_after_cut = [""] * len(cuts)
    for (low, high), value in writes:
        value_after_cut[index_of_cut[low] : index_of_cut[high]] = [repr(value)] * (index_of_cut[high] - index_of_cut[low])
    start = 0
    for i, cell in enumerate(value_after_cut):
        if i + 1 == len(value_after_cut) or value_after_cut[i + 1] != cell:
            if cell:
                yield (cuts[start], cuts[i + 1]), cell
            start = i + 1


def _adjacent_runs(bands: list[tuple[Interval, Interval]]) -> list[list[tuple[Interval, Interval]]]:
    """Split bands into runs of adjacent rows; with too many gaps keep them together, because a table is shorter."""
    runs: list[list[tuple[Interval, Interval]]] = []
    for band in bands:
        if not runs or runs[-1][-1][0][1] != band[0][0]:
            runs.append([])
        runs[-1].append(band)
    return runs if len(runs) <= MOST // 2 else [bands]


def are_adjacent(bands: list[tuple[Interval, Interval]]) -> bool:
    """Return whether each band starts at the row where the one before it ends."""
    return all(before[1] == rows[0] for (before, _), (rows, _) in pairwise(bands))


def fitting_line(edge: list[Interval], end: int) -> ColumnLine | None:
    """Return a line through all (row, column) points of an edge, or None; columns are clamped to [0, end]."""
    clamped = [(row, clamp(column, end)) for row, column in edge]
    return next(
        (line for line in _candidate_lines(clamped, end) if all(clamp(line.at(row), end) == column for row, column in clamped)),
        None,
    )


def _candidate_lines(points: list[Interval], end: int) -> Iterator[ColumnLine]:
    """Yield lines for (row, column) points: a constant, a slope through the inner points, and a staircase of blocks."""
    yield ColumnLine(0, points[0][1])
    inner_points = [(row, column) for row, column in points if 0 < column < end]
    if inner_points:
        (first, first_column), (last, next_column) = inner_points[0], inner_points[-1]
        for factor in [(next_column - first_column) // (last - first)] if last > first else [1, -1]:
            yield ColumnLine(factor, first_column - factor * first)
    jumps = [(row, column) for (_, before), (row, column) in pairwise(points) if column != before]
    if len(jumps) > 1:
        (first, first_column), (second, next_column) = jumps[:2]
        block = second - first
        shift = -first % block
        yield ColumnLine(
            next_column - first_column, first_column - (first + shift) // block * (next_column - first_column), block, shift
        )


def clamp(column: int, end: int) -> int:
    """Return a column clamped to [0, end]."""
    return min(max(column, 0), end)
