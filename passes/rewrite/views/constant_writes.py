"""Replace the constants that loops write into a buffer, by rows or blocks, by one selection on row and column indices.

    for r in range(n): x[r, : r - 2] = c    ->    where(arange(n) < arange(n)[:, None] - 2, c, x)

Each write covers a box, and leaves intervals of columns in each row. Their bounds are given for all rows at once: by a
constant, a line, a staircase of blocks, or a table. Each row is compared with the bounds: nothing is guessed.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, is_alike, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import fill_of, number_in
from streamfx.passes.ops.traits import MOVES_ELEMENTS
from streamfx.passes.rewrite.pattern import equation
from streamfx.passes.rewrite.views.scatter_to_concat import WRITES

aten = torch.ops.aten
OVER = (aten.fill.Scalar, aten.fill.Tensor, aten.copy.default)  # they return their second argument
OF_ROWS = (*WRITES, aten.slice.Tensor, aten.select.int, aten.unbind.int)
END = sys.maxsize  # end of a dimension whose size is only known at run time
FEW = 2  # up to so many writes, each is a strip of its own
MOST = 8  # intervals per row: each one costs a comparison over the full buffer

Interval: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Interval, ...]


@dataclass(frozen=True)
class _Strip:
    """A constant in one interval of columns per row, as bands ((first row, end row), (first column, end column))."""

    number: float
    bands: list[tuple[Interval, Interval]]

    @property
    def rows(self) -> Interval:
        return self.bands[0][0][0], self.bands[-1][0][1]

    def edge(self, side: int) -> list[Interval]:
        """Return (row, column) pairs of each interval's start (0) or end (1); of unbounded rows only the first."""
        ends = ((begin, begin + 1 if end == END else end, columns[side]) for (begin, end), columns in self.bands)
        return [(row, column) for begin, end, column in ends for row in range(begin, end)]


@dataclass(frozen=True)
class _ColumnLine:
    """Columns as a function of the row: `factor` more per `block` rows; the first block is shorter by `shift` rows."""

    factor: int
    offset: int
    block: int = 1
    shift: int = 0

    def at(self, row: int) -> int:
        return (row + self.shift) // self.block * self.factor + self.offset


@equation(*WRITES)
def constants_that_were_written(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[0, :1] = c; x[1, :2] = c; ... -> where(arange(n) < arange(n)[:, None] + 1, c, x)

    Applies to the last of any number of constant writes that cover parts of at most two dimensions. If there are few, and
    their rows are sliced or written again, `scatter_to_concat.py` finds the write of each row instead.
    """
    if any(user.target in WRITES and _written(user) is not None for user in node.users):
        return None
    root, boxes = _all_written(node)
    if len(boxes) <= MOST and any(user.target in OF_ROWS for user in node.users):
        return None
    ends = [size if isinstance(size, int) else END for size in shape_of_node(node)]
    cut = [(tuple((low, min(high, end)) for (low, high), end in zip(box, ends, strict=True)), number) for box, number in boxes]
    cut = [(box, number) for box, number in cut if all(low < high for low, high in box)]
    dims = [dim for dim, end in enumerate(ends) if any(box[dim] != (0, end) for box, _ in cut)]
    if not boxes or len(dims) > 2:
        return None
    extents = {dim: sum(box[dim][1] - box[dim][0] for box, _ in cut) for dim in dims}
    row, column = [*sorted(dims, key=lambda dim: extents[dim]), None, None][:2]
    flat = [(_along(box, row), _along(box, column), number) for box, number in cut]
    one_by_one = [_Strip(number, [(rows, columns)]) for rows, columns, number in flat]
    strips = one_by_one if len(flat) <= FEW else _strips(flat, 1 if column is None else ends[column])
    return _selected(root, node, strips, _Regions(writer, node, row, column)) if len(strips) <= MOST else None


def _along(box: Box, dim: int | None) -> Interval:
    return (0, 1) if dim is None else box[dim]


def _selected(root: fx.Node, node: fx.Node, strips: list[_Strip], regions: _Regions) -> fx.Node | None:
    writer, own = regions.writer, node.meta[VALUE]
    for strip in strips:
        number = strip.number if own.is_floating_point() else bool(strip.number) if own.dtype == torch.bool else int(strip.number)
        found = regions.of(strip)
        if found is None:
            return None
        fill = writer.call(aten.full.default, [], number, dtype=own.dtype, device=own.device)
        call = (aten.where.self, found[0], fill, root) if found else (aten.expand.default, fill, size_arguments(node, writer))
        root = writer.call(*call)
    return root


# -- which boxes are written


def _all_written(node: fx.Node, until: fx.Node | None = None) -> tuple[fx.Node, list[tuple[Box, float]]]:
    """Return the buffer before the first write, and the boxes of all writes in order."""
    found = []
    while node is not until and (written := _written(node)) is not None:
        found.append(written)
        node = node_argument(node)
    return node, [item for written in reversed(found) for item in written]


def _written(node: fx.Node) -> list[tuple[Box, float]] | None:
    """Return the boxes that one operator writes, each with its constant; None if it writes anything but constants."""
    place = _place(node) if node.target in WRITES else None
    if place is None or not is_alike(node_argument(node, 1), node):
        return None
    base, rows = node_argument(node), node_argument(node, 1)
    is_row, (dim, low, high) = node.target is aten.select_scatter.default, place
    inner: list[tuple[Box, float]] = []
    number = _number(rows)
    if number is None:
        before = node_argument(base, 1) if base.target is node.target and _place(base) == place else None
        root, inner = _all_written(rows, before)
        number = _number(root) if inner else None
        if not inner or (number is None and root is not before and not _is_view(root, is_row, place, base)):
            return None
    if number is not None:
        inner = [(((0, END),) * len(shape_of_node(rows)), number), *inner]
    if is_row:
        return [((*box[:dim], (low, high), *box[dim:]), number) for box, number in inner]
    moved = [(box, (low + box[dim][0], min(low + min(box[dim][1], END - low), high)), number) for box, number in inner]
    return [((*box[:dim], own, *box[dim + 1 :]), number) for box, own, number in moved]


def _place(node: fx.Node) -> tuple[int, int, int] | None:
    """Return the dimension, first row and end row of a write or a view; None if they are not known."""
    arguments = bound_arguments(node)
    source = node_argument(node)
    rank = len(shape_of_node(source))
    dim = arguments["dim"] % max(rank, 1)
    size = shape_of_node(source)[dim] if rank else None
    end = size if isinstance(size, int) else END
    if "index" in arguments:
        index = arguments["index"]
        known = isinstance(index, int) and (index >= 0 or end != END)
        return (dim, index % end, index % end + 1) if known else None
    start, stop = arguments["start"], arguments["end"]
    start, stop = 0 if start is None else start, END if stop is None else stop
    if not all(isinstance(bound, int) and (bound >= 0 or end != END) for bound in (start, stop)) or arguments["step"] != 1:
        return None
    begin, stop_row, _ = slice(start, stop).indices(end)
    return dim, begin, stop_row


def _is_view(view: fx.Node, is_row: bool, place: tuple[int, int, int], base: fx.Node) -> bool:
    """Whether a value is these rows of the buffer: a view of it, of a value written there, or of it before other writes."""
    if view.target is operator.getitem and node_argument(view).target is aten.unbind.int:
        parts, index = node_argument(view), int_argument(view, 1)
        source, own = node_argument(parts), (bound_arguments(parts)["dim"] % len(shape_of_node(base)), index, index + 1)
    elif view.target is (aten.select.int if is_row else aten.slice.Tensor):
        source, own = node_argument(view), _place(view)  # type: ignore[assignment]
    else:
        return False
    dim, low, high = place
    while source is not base or own != place:
        other = _place(base) if base.target in WRITES else None
        if other is None or other[0] != dim:
            return False
        if base.target is aten.slice_scatter.default and source is node_argument(base, 1):
            return other[1] <= low and high <= other[2] and own == (dim, low - other[1], high - other[1])
        if other[1] < high and low < other[2]:
            return False
        base = node_argument(base)
    return True


def _number(rows: fx.Node) -> float | None:
    """Return the constant that all elements hold."""
    while rows.target in MOVES_ELEMENTS:
        rows = node_argument(rows)
    if rows.target is aten.zero.default:
        return 0.0
    if rows.target not in OVER:
        return fill_of(rows)
    value, dtype = rows.args[1], rows.meta[VALUE].dtype
    if not isinstance(value, fx.Node):
        return number_in(value, dtype)
    number = _number(value)
    types = {value.meta[VALUE].dtype, dtype}
    is_held = number is not None and (len(types) == 1 or all(_holds(own, number) for own in types))
    return number if is_held else None


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a dtype represents a number exactly."""
    if dtype.is_complex or (not dtype.is_floating_point and not number.is_integer()):
        return False
    if not dtype.is_floating_point and dtype != torch.bool and not torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max:
        return False
    return number != number or torch.tensor(number).to(torch.float64).to(dtype).to(torch.float64).item() == number


# -- which columns of a row hold which constant


def _strips(boxes: Sequence[tuple[Interval, Interval, float]], end: int) -> list[_Strip]:
    """Return the constants that the last write to each element leaves, grouped by value and order within the row."""
    bounds = sorted({bound for rows, _, _ in boxes for bound in rows})
    number = {bound: i for i, bound in enumerate(bounds)}
    bands: list[list[tuple[Interval, float]]] = [[] for _ in bounds]
    for rows, columns, value in boxes:
        for i in range(number[rows[0]], number[rows[1]]):
            bands[i].append((columns, value))
    found: dict[str, list[list[tuple[Interval, Interval]]]] = defaultdict(list)
    for rows, written in zip(pairwise(bounds), bands, strict=False):
        left: dict[str, list[tuple[Interval, Interval]]] = defaultdict(list)
        for columns, key in _remaining(written):
            left[key].append((rows, columns))
        for key, intervals in left.items():
            found[key].append(intervals)
    values = {repr(value): value for _, _, value in boxes}
    return [_Strip(values[key], part) for key, by_row in found.items() for part in _grouped_strips(by_row, end)]


def _grouped_strips(by_row: list[list[tuple[Interval, Interval]]], end: int) -> list[list[tuple[Interval, Interval]]]:
    """Group intervals into few strips: one if each row has one interval with bounds on lines; else by touched side."""
    if all(len(intervals) == 1 for intervals in by_row):
        parts = _adjacent_runs([intervals[0] for intervals in by_row])
        if all(_line(_Strip(0, part).edge(side), end) is not None for part in parts for side in (0, 1)):
            return parts
    kinds: dict[Any, list[tuple[Interval, Interval]]] = defaultdict(list)
    for intervals in by_row:
        for i, (rows, columns) in enumerate(intervals):
            touched = (columns[0] == 0, columns[1] == end)
            kinds[touched, 0 if any(touched) else i].append((rows, columns))
    return [part for bands in kinds.values() for part in _adjacent_runs(bands)]


def _remaining(written: list[tuple[Interval, float]]) -> Iterator[tuple[Interval, str]]:
    """Return the intervals that remain after all writes to one row, with the constant of each."""
    cuts = sorted({bound for columns, _ in written for bound in columns})
    place = {bound: i for i, bound in enumerate(cuts)}
    cells = [""] * len(cuts)
    for (low, high), value in written:
        cells[place[low] : place[high]] = [repr(value)] * (place[high] - place[low])
    start = 0
    for i, cell in enumerate(cells):
        if i + 1 == len(cells) or cells[i + 1] != cell:
            if cell:
                yield (cuts[start], cuts[i + 1]), cell
            start = i + 1


def _adjacent_runs(bands: list[tuple[Interval, Interval]]) -> list[list[tuple[Interval, Interval]]]:
    """Split bands into runs of adjacent rows; with too many gaps keep them together, because a table is shorter."""
    parts: list[list[tuple[Interval, Interval]]] = []
    for band in bands:
        if not parts or parts[-1][-1][0][1] != band[0][0]:
            parts.append([])
        parts[-1].append(band)
    return parts if len(parts) <= MOST // 2 else [bands]


def _are_adjacent(bands: list[tuple[Interval, Interval]]) -> bool:
    return all(before[1] == rows[0] for (before, _), (rows, _) in pairwise(bands))


# -- the selection by row and column indices


class _Regions:
    """Write the condition that an element lies in a strip."""

    def __init__(self, writer: GraphWriter, like: fx.Node, row: int | None, column: int | None) -> None:
        self.writer, self._like, self._row, self._column = writer, like, row, column
        self._rows, self._columns = self._size(row), self._size(column)

    def of(self, strip: _Strip) -> list[fx.Node] | None:
        """Return the condition for a strip as a list: empty if it is always true; None if it cannot be written."""
        begin, end = strip.rows
        low, high = (_line(strip.edge(side), self._columns) for side in (0, 1))
        if low is None or high is None or not _are_adjacent(strip.bands) or (end == END and (low.factor or high.factor)):
            tables = [] if self._rows == END else [self._table(strip.edge(side)) for side in (0, 1)]
            if self._column is None:  # the only column has index 0
                return [self.writer.call(aten.gt.Scalar, table, 0) for table in tables[1:]] or None
            return self._all([self._compared(name, table) for name, table in zip(("ge", "lt"), tables, strict=False)]) or None
        terms, rows = list[fx.Node](), range(min(self._rows, begin + 1 if end == END else end))
        if self._is_empty_outside(low, high, begin, end):
            rows = range(min(self._rows, END - 1)) if end != END else rows
        else:
            terms, rows = self._is_between(begin, end), rows[begin:]
        terms += [self._compared("ge", low)] if any(low.at(row) > 0 for row in rows) else []
        terms += [self._compared("lt", high)] if any(high.at(row) < self._columns for row in rows) else []
        return self._all(terms)

    def _is_empty_outside(self, low: _ColumnLine, high: _ColumnLine, begin: int, end: int) -> bool:
        """Whether two lines leave no column between them in rows before `begin` and from `end` on."""
        if self._rows == END:
            return begin == 0 and end == END
        outside = (*range(begin), *range(end, self._rows))
        return all(_within(low.at(row), self._columns) >= _within(high.at(row), self._columns) for row in outside)

    def _is_between(self, begin: int, end: int) -> list[fx.Node]:
        """Return the conditions that hold for rows [begin, end) only."""
        if end == begin + 1:
            return [self.writer.call(aten.eq.Scalar, self._numbers(self._row), begin)]
        bounds = ((aten.ge.Scalar, begin, begin > 0), (aten.lt.Scalar, end, end < self._rows))
        return [self.writer.call(target, self._numbers(self._row), bound) for target, bound, is_needed in bounds if is_needed]

    def _compared(self, name: str, edge: _ColumnLine | fx.Node) -> fx.Node:
        """Compare column indices with the edge of each row's interval."""
        columns, overload = self._numbers(self._column), getattr(aten, name)
        if isinstance(edge, _ColumnLine) and edge.factor == 0:
            return self.writer.call(overload.Scalar, columns, edge.offset)
        return self.writer.call(overload.Tensor, columns, self._columns_of(edge) if isinstance(edge, _ColumnLine) else edge)

    def _columns_of(self, line: _ColumnLine) -> fx.Node:
        columns = self._numbers(self._row)
        for operation, number, nothing in (
            (aten.add.Tensor, line.shift, 0),
            (aten.floor_divide.default, line.block, 1),
            (aten.mul.Tensor, line.factor, 1),
            (aten.add.Tensor, line.offset, 0),
        ):
            columns = columns if number == nothing else self.writer.call(operation, columns, number)
        return columns

    def _table(self, edge: list[Interval]) -> fx.Node:
        """Return the column of an edge for each row as a vector; 0 for rows without an interval."""
        known, keywords = dict(edge), {"dtype": torch.int64, "device": self._like.meta[VALUE].device}
        columns = [known.get(row, 0) for row in range(self._rows)]
        parts, start = list[fx.Node](), 0
        while start < len(columns):
            stop, step = start + 1, columns[start + 1] - columns[start] if start + 1 < len(columns) else 0
            while stop < len(columns) and columns[stop] - columns[stop - 1] == step:
                stop += 1
            low, high = columns[start], columns[stop - 1] + step
            line = step and stop - start > 1
            segment = (aten.arange.start_step, low, high, step) if line else (aten.full.default, [stop - start], low)
            parts.append(self.writer.call(*segment, **keywords))
            start = stop
        return self._along(self.writer.call(aten.cat.default, parts), self._row)

    def _numbers(self, dim: int | None) -> fx.Node:
        """Return the indices of all rows, or columns, along their dimension."""
        size = size_arguments(self._like, self.writer)[dim or 0]
        return self._along(self.writer.call(aten.arange.default, size, device=self._like.meta[VALUE].device), dim)

    def _along(self, vector: fx.Node, dim: int | None) -> fx.Node:
        for position in range(1, len(shape_of_node(self._like)) - (dim or 0)):
            vector = self.writer.call(aten.unsqueeze.default, vector, position)
        return vector

    def _all(self, terms: list[fx.Node]) -> list[fx.Node]:
        return [reduce(partial(self.writer.call, aten.logical_and.default), terms)] if terms else []

    def _size(self, dim: int | None) -> int:
        size = 1 if dim is None else shape_of_node(self._like)[dim]
        return size if isinstance(size, int) else END


def _line(edge: list[Interval], end: int) -> _ColumnLine | None:
    """Return a line that gives the column of each row's edge, if there is one; columns are clamped to [0, end]."""
    known = [(row, _within(column, end)) for row, column in edge]
    return next((line for line in _lines(known, end) if all(_within(line.at(row), end) == column for row, column in known)), None)


def _lines(known: list[Interval], end: int) -> Iterator[_ColumnLine]:
    """Yield candidates: a constant, a slope through the first and last inner column, and a staircase of blocks."""
    yield _ColumnLine(0, known[0][1])
    inside = [(row, column) for row, column in known if 0 < column < end]
    if inside:
        (first, low), (last, high) = inside[0], inside[-1]
        for factor in [(high - low) // (last - first)] if last > first else [1, -1]:
            yield _ColumnLine(factor, low - factor * first)
    steps = [(row, column) for (_, before), (row, column) in pairwise(known) if column != before]
    if len(steps) > 1:
        (first, low), (second, high) = steps[:2]
        block = second - first
        shift = -first % block
        yield _ColumnLine(high - low, low - (first + shift) // block * (high - low), block, shift)


def _within(column: int, end: int) -> int:
    return min(max(column, 0), end)
