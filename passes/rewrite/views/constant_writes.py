"""Replace the constants that loops write into a buffer, row by row or block by block, by a few selections.

    for r in range(n): x[r, : r - 2] = c    ->    where(arange(n) < arange(n)[:, None] - 2, c, x)

Each write covers a box, an interval of each dimension. After all writes, each constant is visible in an interval of columns
per row. The bounds of these intervals become a constant, a line, a staircase of blocks, or a table, which is checked for
each row.
"""

from __future__ import annotations

import operator
from functools import partial, reduce
from typing import TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, int_argument, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import exact_number, find_fill
from streamfx.passes.ops.traits import MOVES_ELEMENTS
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.column_strips import (
    END,
    MAX_INTERVALS,
    Band,
    ColumnLine,
    Interval,
    Strip,
    are_adjacent,
    clamp,
    fit_line,
    group_into_strips,
)
from streamfx.passes.rewrite.views.scatter_to_concat import WRITES
from streamfx.passes.rewrite.views.tile_views import RowSlice

aten = torch.ops.aten
OVERWRITES = (aten.fill.Scalar, aten.fill.Tensor, aten.copy.default)  # they return their second argument
ROW_OPERATORS = (*WRITES, aten.slice.Tensor, aten.select.int, aten.unbind.int)
MAX_SINGLE_STRIPS = 2  # if there are at most this many writes, each is a separate strip

Box: TypeAlias = tuple[Interval, ...]


@rewrite_rule(*WRITES)
def constant_writes_to_where(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[0, :1] = c; x[1, :2] = c; ... -> where(arange(n) < arange(n)[:, None] + 1, c, x)

    Applies to the last of any number of constant writes that cover parts of at most two dimensions. If there are few, and
    their rows are sliced or overwritten, `scatter_to_concat.py` finds the write of each row instead.
    """
    if any(user.target in WRITES and _match_written_boxes(user) is not None for user in node.users):
        return None
    buffer, boxes = _find_writes(node)
    if len(boxes) <= MAX_INTERVALS and any(user.target in ROW_OPERATORS for user in node.users):
        return None
    ends = [size if isinstance(size, int) else END for size in shape_of_node(node)]
    clipped = [
        (tuple((low, min(high, end)) for (low, high), end in zip(box, ends, strict=True)), number) for box, number in boxes
    ]
    clipped = [(box, number) for box, number in clipped if all(low < high for low, high in box)]
    dims = [dim for dim, end in enumerate(ends) if any(box[dim] != (0, end) for box, _ in clipped)]
    if not boxes or len(dims) > 2:
        return None
    written_extent = {dim: sum(box[dim][1] - box[dim][0] for box, _ in clipped) for dim in dims}
    row, column = [*sorted(dims, key=lambda dim: written_extent[dim]), None, None][:2]
    rectangles = [(_interval_along(box, row), _interval_along(box, column), number) for box, number in clipped]
    single_strips = [Strip(number, [Band(rows, columns)]) for rows, columns, number in rectangles]
    strips = (
        single_strips
        if len(rectangles) <= MAX_SINGLE_STRIPS
        else group_into_strips(rectangles, 1 if column is None else ends[column])
    )
    return _emit_selections(buffer, node, strips, _Regions(writer, node, row, column)) if len(strips) <= MAX_INTERVALS else None


def _interval_along(box: Box, dim: int | None) -> Interval:
    """Return a box's interval along a dimension; [0, 1) if the buffer has no such dimension."""
    return (0, 1) if dim is None else box[dim]


def _emit_selections(buffer: fx.Node, node: fx.Node, strips: list[Strip], regions: _Regions) -> fx.Node | None:
    """Emit a `where` per strip that selects its constant instead of the buffer; None if a strip has no condition."""
    writer, value = regions.writer, node.meta[VALUE]
    for strip in strips:
        number = (
            strip.number if value.is_floating_point() else bool(strip.number) if value.dtype == torch.bool else int(strip.number)
        )
        conditions = regions.of(strip)
        if conditions is None:
            return None
        fill = writer.call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
        call = (
            (aten.where.self, conditions[0], fill, buffer)
            if conditions
            else (aten.expand.default, fill, size_arguments(node, writer))
        )
        buffer = writer.call(*call)
    return buffer


# -- which boxes are written


def _find_writes(node: fx.Node, last_base: fx.Node | None = None) -> tuple[fx.Node, list[tuple[Box, float]]]:
    """Return the buffer before the first write, and the boxes of all writes in order."""
    writes = []
    while node is not last_base and (boxes := _match_written_boxes(node)) is not None:
        writes.append(boxes)
        node = node_argument(node)
    return node, [item for boxes in reversed(writes) for item in boxes]


def _match_written_boxes(node: fx.Node) -> list[tuple[Box, float]] | None:
    """Return the boxes that one operator writes, each with its constant; None if it writes anything but constants."""
    target_rows = _find_rows(node) if node.target in WRITES else None
    if target_rows is None or not has_same_type(node_argument(node, 1), node):
        return None
    base, rows = node_argument(node), node_argument(node, 1)
    is_single_row, (dim, low, high) = node.target is aten.select_scatter.default, target_rows
    boxes: list[tuple[Box, float]] = []
    number = _find_constant(rows)
    if number is None:
        view_before = node_argument(base, 1) if base.target is node.target and _find_rows(base) == target_rows else None
        root, boxes = _find_writes(rows, view_before)
        number = _find_constant(root) if boxes else None
        if not boxes or (
            number is None and root is not view_before and not _is_view_of_buffer(root, is_single_row, target_rows, base)
        ):
            return None
    if number is not None:
        boxes = [(((0, END),) * len(shape_of_node(rows)), number), *boxes]
    if is_single_row:
        return [((*box[:dim], (low, high), *box[dim:]), number) for box, number in boxes]
    shifted = [(box, (low + box[dim][0], min(low + min(box[dim][1], END - low), high)), number) for box, number in boxes]
    return [((*box[:dim], interval, *box[dim + 1 :]), number) for box, interval, number in shifted]


def _find_rows(node: fx.Node) -> RowSlice | None:
    """Return the rows that a write or a view accesses; None if they are not known."""
    arguments = bound_arguments(node)
    source = node_argument(node)
    rank = len(shape_of_node(source))
    dim = arguments["dim"] % max(rank, 1)
    size = shape_of_node(source)[dim] if rank else None
    end = size if isinstance(size, int) else END
    if "index" in arguments:
        index = arguments["index"]
        is_static = isinstance(index, int) and (index >= 0 or end != END)
        return RowSlice(dim, index % end, index % end + 1) if is_static else None
    start = 0 if arguments["start"] is None else arguments["start"]
    stop = END if arguments["end"] is None else arguments["end"]
    if not all(isinstance(bound, int) and (bound >= 0 or end != END) for bound in (start, stop)) or arguments["step"] != 1:
        return None
    first, stop_row, _ = slice(start, stop).indices(end)
    return RowSlice(dim, first, stop_row)


def _is_view_of_buffer(view: fx.Node, is_single_row: bool, rows: RowSlice, base: fx.Node) -> bool:
    """Return whether a value is a view of these rows of the buffer `base`.

    The view may be of the buffer, of a value that was written there, or of the buffer before writes to other rows.
    """
    if view.target is operator.getitem and node_argument(view).target is aten.unbind.int:
        unbind, index = node_argument(view), int_argument(view, 1)
        source = node_argument(unbind)
        viewed_rows: RowSlice | None = RowSlice(bound_arguments(unbind)["dim"] % len(shape_of_node(base)), index, index + 1)
    elif view.target is (aten.select.int if is_single_row else aten.slice.Tensor):
        source, viewed_rows = node_argument(view), _find_rows(view)
    else:
        return False
    while source is not base or viewed_rows != rows:
        written = _find_rows(base) if base.target in WRITES else None
        if written is None or written.dim != rows.dim:
            return False
        if base.target is aten.slice_scatter.default and source is node_argument(base, 1):
            return written.contains(rows) and viewed_rows == (rows.dim, rows.start - written.start, rows.stop - written.start)
        if not written.is_disjoint(rows):
            return False
        base = node_argument(base)
    return True


def _find_constant(rows: fx.Node) -> float | None:
    """Return the constant that all elements of a value equal, or None."""
    while rows.target in MOVES_ELEMENTS:
        rows = node_argument(rows)
    if rows.target is aten.zero.default:
        return 0.0
    if rows.target not in OVERWRITES:
        return find_fill(rows)
    value, dtype = rows.args[1], rows.meta[VALUE].dtype
    if not isinstance(value, fx.Node):
        return exact_number(value, dtype)
    number = _find_constant(value)
    dtypes = {value.meta[VALUE].dtype, dtype}
    is_exact = number is not None and (len(dtypes) == 1 or all(_represents(each_dtype, number) for each_dtype in dtypes))
    return number if is_exact else None


def _represents(dtype: torch.dtype, number: float) -> bool:
    """Return whether a dtype represents a number exactly."""
    if dtype.is_complex or (not dtype.is_floating_point and not number.is_integer()):
        return False
    if not dtype.is_floating_point and dtype != torch.bool and not torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max:
        return False
    return number != number or torch.tensor(number).to(torch.float64).to(dtype).to(torch.float64).item() == number


# -- the selection by row and column indices


class _Regions:
    """Emits, for a strip, the condition that an element of the buffer lies in it."""

    def __init__(self, writer: GraphWriter, like: fx.Node, row: int | None, column: int | None) -> None:
        """Store the writer, a tensor of the buffer's shape, and its row and column dimensions (None: only one of them)."""
        self.writer, self._like, self._row, self._column = writer, like, row, column
        self._rows, self._columns = self._size(row), self._size(column)

    def of(self, strip: Strip) -> list[fx.Node] | None:
        """Emit the condition for a strip; return it as a list, empty if it is always true. None if it cannot be expressed."""
        start, end = strip.rows
        low, high = (fit_line(strip.edge(side), self._columns) for side in (0, 1))
        if low is None or high is None or not are_adjacent(strip.bands) or (end == END and (low.factor or high.factor)):
            tables = [] if self._rows == END else [self._column_table(strip.edge(side)) for side in (0, 1)]
            if self._column is None:  # the only column has index 0
                return [self.writer.call(aten.gt.Scalar, table, 0) for table in tables[1:]] or None
            return (
                self._conjunction([self._compared(name, table) for name, table in zip(("ge", "lt"), tables, strict=False)])
                or None
            )
        terms, rows = list[fx.Node](), range(min(self._rows, start + 1 if end == END else end))
        if self._is_empty_outside(low, high, start, end):
            rows = range(min(self._rows, END - 1)) if end != END else rows
        else:
            terms, rows = self._emit_row_conditions(start, end), rows[start:]
        terms += [self._compared("ge", low)] if any(low.at(row) > 0 for row in rows) else []
        terms += [self._compared("lt", high)] if any(high.at(row) < self._columns for row in rows) else []
        return self._conjunction(terms)

    def _is_empty_outside(self, low: ColumnLine, high: ColumnLine, start: int, end: int) -> bool:
        """Return whether two lines leave no column between them in rows before `start` and from `end` on."""
        if self._rows == END:
            return start == 0 and end == END
        outside = (*range(start), *range(end, self._rows))
        return all(clamp(low.at(row), self._columns) >= clamp(high.at(row), self._columns) for row in outside)

    def _emit_row_conditions(self, start: int, end: int) -> list[fx.Node]:
        """Emit the conditions that hold for rows [start, end) only."""
        if end == start + 1:
            return [self.writer.call(aten.eq.Scalar, self._indices(self._row), start)]
        bounds = ((aten.ge.Scalar, start, start > 0), (aten.lt.Scalar, end, end < self._rows))
        return [self.writer.call(target, self._indices(self._row), bound) for target, bound, is_needed in bounds if is_needed]

    def _compared(self, name: str, edge: ColumnLine | fx.Node) -> fx.Node:
        """Emit the comparison `name` ("ge" or "lt") of column indices with the edge of each row's interval."""
        columns, overload = self._indices(self._column), getattr(aten, name)
        if isinstance(edge, ColumnLine) and edge.factor == 0:
            return self.writer.call(overload.Scalar, columns, edge.offset)
        return self.writer.call(overload.Tensor, columns, self._columns_of(edge) if isinstance(edge, ColumnLine) else edge)

    def _columns_of(self, line: ColumnLine) -> fx.Node:
        """Emit the column of a line for each row, from the row indices."""
        columns = self._indices(self._row)
        for operation, operand, neutral in (
            (aten.add.Tensor, line.shift, 0),
            (aten.floor_divide.default, line.block, 1),
            (aten.mul.Tensor, line.factor, 1),
            (aten.add.Tensor, line.offset, 0),
        ):
            columns = columns if operand == neutral else self.writer.call(operation, columns, operand)
        return columns

    def _column_table(self, edge: list[Interval]) -> fx.Node:
        """Emit a vector with the column of an edge for each row, 0 for rows without an interval."""
        column_by_row, keywords = dict(edge), {"dtype": torch.int64, "device": self._like.meta[VALUE].device}
        columns = [column_by_row.get(row, 0) for row in range(self._rows)]
        segments, start = list[fx.Node](), 0
        while start < len(columns):
            stop, step = start + 1, columns[start + 1] - columns[start] if start + 1 < len(columns) else 0
            while stop < len(columns) and columns[stop] - columns[stop - 1] == step:
                stop += 1
            low, high = columns[start], columns[stop - 1] + step
            is_arange = step and stop - start > 1
            segment = (aten.arange.start_step, low, high, step) if is_arange else (aten.full.default, [stop - start], low)
            segments.append(self.writer.call(*segment, **keywords))
            start = stop
        return self._broadcast_along(self.writer.call(aten.cat.default, segments), self._row)

    def _indices(self, dim: int | None) -> fx.Node:
        """Return the indices of all rows, or columns, along their dimension."""
        size = size_arguments(self._like, self.writer)[dim or 0]
        return self._broadcast_along(self.writer.call(aten.arange.default, size, device=self._like.meta[VALUE].device), dim)

    def _broadcast_along(self, vector: fx.Node, dim: int | None) -> fx.Node:
        """Unsqueeze a vector so that it broadcasts along one dimension of the buffer."""
        for position in range(1, len(shape_of_node(self._like)) - (dim or 0)):
            vector = self.writer.call(aten.unsqueeze.default, vector, position)
        return vector

    def _conjunction(self, terms: list[fx.Node]) -> list[fx.Node]:
        """Return the conjunction of all terms as a list of one condition, or the empty list."""
        return [reduce(partial(self.writer.call, aten.logical_and.default), terms)] if terms else []

    def _size(self, dim: int | None) -> int:
        """Return the size of a dimension; 1 if there is none, `END` if it is dynamic."""
        size = 1 if dim is None else shape_of_node(self._like)[dim]
        return size if isinstance(size, int) else END
