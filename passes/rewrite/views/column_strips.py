"""Group the rectangles that constant writes cover into strips, each with one interval of columns per row.

    x[0:2, 0:1] = c, x[2:4, 0:2] = c     ->    one strip of c: columns [0, 1) in rows 0 and 1, [0, 2) in rows 2 and 3

A *band* is a rectangle of the buffer that holds one constant. A *strip* is a list of bands of one constant, below each
other. If possible, the starts and the ends of a strip's intervals (its two *edges*) are a function of the row index: a
constant, a slope, or a staircase of blocks (`ColumnLine`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

END = sys.maxsize  # end of a dimension whose size is only known at run time
MAX_INTERVALS = 8  # intervals per row: each one costs a comparison over the full buffer

Interval: TypeAlias = tuple[int, int]  # [start, end)
Point: TypeAlias = tuple[int, int]  # (row, column)


class Band(NamedTuple):
    """A rectangle: adjacent rows with equal intervals of columns."""

    rows: Interval
    columns: Interval


@dataclass(frozen=True)
class Strip:
    """A constant (`number`) in one interval of columns per row, as bands in the order of their rows."""

    number: float
    bands: list[Band]

    @property
    def rows(self) -> Interval:
        """Return the first row of the first band and the end row of the last band."""
        return self.bands[0].rows[0], self.bands[-1].rows[1]

    def edge(self, side: int) -> list[Point]:
        """Return a point per row: the row, and the start (`side` 0) or the end (`side` 1) of its interval of columns.

        If a band's number of rows is dynamic, return only its first row.
        """
        ends = ((start, start + 1 if end == END else end, columns[side]) for (start, end), columns in self.bands)
        return [(row, column) for start, end, column in ends for row in range(start, end)]


@dataclass(frozen=True)
class ColumnLine:
    """Columns as a function of the row: `factor` more per `block` rows; the first block is shorter by `shift` rows.

    ColumnLine(factor=2, offset=1, block=3) has the columns 1 1 1 3 3 3 5 5 5.
    """

    factor: int
    offset: int
    block: int = 1
    shift: int = 0

    def at(self, row: int) -> int:
        """Return the column on the line for a row."""
        return (row + self.shift) // self.block * self.factor + self.offset


def group_into_strips(boxes: Sequence[tuple[Interval, Interval, float]], end: int) -> list[Strip]:
    """Return the constants that the last write to each element leaves, as few strips.

    `boxes` are the writes in order: rows, columns, and the constant. `end` is the number of columns. The rows are cut at all
    bounds of writes; within one interval of rows, all rows see the same writes.
    """
    row_bounds = sorted({bound for rows, _, _ in boxes for bound in rows})
    index_of_bound = {bound: i for i, bound in enumerate(row_bounds)}
    writes_by_interval: list[list[tuple[Interval, float]]] = [[] for _ in row_bounds]  # the last one stays empty
    for rows, columns, number in boxes:
        for i in range(index_of_bound[rows[0]], index_of_bound[rows[1]]):
            writes_by_interval[i].append((columns, number))
    bands_by_constant: dict[str, list[list[Band]]] = defaultdict(list)  # for each constant, the bands of each interval of rows
    for rows, writes in zip(pairwise(row_bounds), writes_by_interval, strict=False):
        bands_in_rows: dict[str, list[Band]] = defaultdict(list)
        for columns, constant in _visible_intervals(writes):
            bands_in_rows[constant].append(Band(rows, columns))
        for constant, bands in bands_in_rows.items():
            bands_by_constant[constant].append(bands)
    number_of_constant = {repr(number): number for _, _, number in boxes}
    return [
        Strip(number_of_constant[constant], bands)
        for constant, bands_by_rows in bands_by_constant.items()
        for bands in _group_bands(bands_by_rows, end)
    ]


def _group_bands(bands_by_rows: list[list[Band]], end: int) -> list[list[Band]]:
    """Group the bands of one constant into lists of bands, one list for each strip.

    `bands_by_rows` has the bands of each interval of rows; `end` is the number of columns. If each row has one band and the
    bounds lie on lines, adjacent bands are one strip. Otherwise a strip has the bands that touch the same side of the
    buffer, or that have the same index within their rows.
    """
    if all(len(bands) == 1 for bands in bands_by_rows):
        runs = _adjacent_runs([bands[0] for bands in bands_by_rows])
        if all(fit_line(Strip(0, run).edge(side), end) is not None for run in runs for side in (0, 1)):
            return runs
    by_touched_side: dict[Any, list[Band]] = defaultdict(list)
    for bands in bands_by_rows:
        for i, band in enumerate(bands):
            touched = (band.columns[0] == 0, band.columns[1] == end)
            by_touched_side[touched, 0 if any(touched) else i].append(band)
    return [run for bands in by_touched_side.values() for run in _adjacent_runs(bands)]


def _visible_intervals(writes: list[tuple[Interval, float]]) -> Iterator[tuple[Interval, str]]:
    """Yield (interval of columns, constant) for rows with these writes: the constant that the last write leaves there.

    `writes` are in order: [0, 4) = 1.0 and then [2, 3) = 0.0 yields [0, 2) "1.0", [2, 3) "0.0", [3, 4) "1.0". Columns
    without a write are omitted. A constant is returned as its `repr`, which distinguishes -0.0 from 0.0 and makes nan equal
    to itself.
    """
    bounds = sorted({bound for columns, _ in writes for bound in columns})
    index_of_bound = {bound: i for i, bound in enumerate(bounds)}
    constants = [""] * len(bounds)  # the constant between each bound and the next one
    for (low, high), value in writes:
        constants[index_of_bound[low] : index_of_bound[high]] = [repr(value)] * (index_of_bound[high] - index_of_bound[low])
    start = 0
    for i, constant in enumerate(constants):
        if i + 1 == len(constants) or constants[i + 1] != constant:
            if constant:
                yield (bounds[start], bounds[i + 1]), constant
            start = i + 1


def _adjacent_runs(bands: list[Band]) -> list[list[Band]]:
    """Split bands, which are sorted by rows, into runs without gaps between their rows.

    Return one run of all bands if there are many gaps, because one table for all rows is then cheaper.
    """
    runs: list[list[Band]] = []
    for band in bands:
        if not runs or runs[-1][-1].rows[1] != band.rows[0]:
            runs.append([])
        runs[-1].append(band)
    return runs if len(runs) <= MAX_INTERVALS // 2 else [bands]


def are_adjacent(bands: list[Band]) -> bool:
    """Return whether each band starts at the row where the previous one ends."""
    return all(previous.rows[1] == band.rows[0] for previous, band in pairwise(bands))


def fit_line(edge: list[Point], end: int) -> ColumnLine | None:
    """Return a line through all points of an edge, or None if no line fits.

    `end` is the number of columns; both the line's columns and the edge's are clamped to [0, end].
    """
    points = [(row, clamp(column, end)) for row, column in edge]
    for line in _candidate_lines(points, end):
        if all(clamp(line.at(row), end) == column for row, column in points):
            return line
    return None


def _candidate_lines(points: list[Point], end: int) -> Iterator[ColumnLine]:
    """Yield lines that may fit all points: a constant, a slope, and a staircase of blocks.

    The slope goes through the first and last point whose column is not at a side of the buffer; a single such point may be
    on a slope of 1 or -1. The staircase has the first two jumps of the column.
    """
    yield ColumnLine(0, points[0][1])
    inner_points = [(row, column) for row, column in points if 0 < column < end]
    if inner_points:
        first_row, first_column = inner_points[0]
        last_row, last_column = inner_points[-1]
        factors = [(last_column - first_column) // (last_row - first_row)] if last_row > first_row else [1, -1]
        for factor in factors:
            yield ColumnLine(factor, first_column - factor * first_row)
    jumps = [(row, column) for (_, before), (row, column) in pairwise(points) if column != before]
    if len(jumps) > 1:
        (first_row, first_column), (second_row, second_column) = jumps[:2]
        factor = second_column - first_column
        block = second_row - first_row
        shift = -first_row % block
        yield ColumnLine(factor, first_column - (first_row + shift) // block * factor, block, shift)


def clamp(column: int, end: int) -> int:
    """Return a column clamped to [0, end]."""
    return min(max(column, 0), end)
