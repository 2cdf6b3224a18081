"""Replace the constants that loops write into a buffer, row by row or block by block, by a few selections.

    for r in range(n): x[r, : r - 2] = c    ->    where(arange(n) < arange(n)[:, None] - 2, c, x)

A write is `slice_scatter` or `select_scatter`. Each covers a *box*: an interval of each dimension. At most two dimensions
may be covered in part; in this file, they are the rows and the columns of the buffer. After all writes, each constant is
visible in an interval of columns per row (a *strip*). The start and the end of these intervals (its two *edges*) become a
constant, a line, a staircase of blocks, or a table, which is checked for each row. `END` is the end of a dynamic dimension.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import node_argument, shape_of_node
from streamfx.ir.operator_table import MOVES_ELEMENTS, Kind, is_kind, of_kind
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import exact_number, find_fill
from streamfx.passes.ops.row_maps import OVERWRITES, RowMove, RowSlice, row_read, row_write
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.column_strips import (
    END,
    MAX_INTERVALS,
    Band,
    ColumnLine,
    Interval,
    Point,
    Strip,
    are_adjacent,
    clamp,
    fit_line,
    group_into_strips,
)

aten = torch.ops.aten
ROW_OPERATORS = of_kind(Kind.OVERWRITE_ROWS, Kind.SLICE, Kind.SELECT, Kind.UNBIND)
MAX_SINGLE_STRIPS = 2  # if there are at most this many writes, each is a separate strip

Box: TypeAlias = tuple[Interval, ...]


@rewrite_rule(*OVERWRITES)
def constant_writes_to_where(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[0, :1] = c; x[1, :2] = c; ... -> where(arange(n) < arange(n)[:, None] + 1, c, x)

    Applies to the last of any number of constant writes that cover parts of at most two dimensions. If there are few, and
    their rows are sliced or overwritten, `scatter_to_concat.py` finds the write of each row instead.
    """
    if any(user.target in OVERWRITES and _match_written_boxes(user) is not None for user in node.users):
        return None
    buffer, boxes = _find_writes(node)
    if len(boxes) <= MAX_INTERVALS and any(user.target in ROW_OPERATORS for user in node.users):
        return None
    ends = [size if isinstance(size, int) else END for size in shape_of_node(node)]
    clipped = [
        (tuple((low, min(high, end)) for (low, high), end in zip(box, ends, strict=True)), number) for box, number in boxes
    ]
    clipped = [(box, number) for box, number in clipped if all(low < high for low, high in box)]
    partly_written_dims = [dim for dim, end in enumerate(ends) if any(box[dim] != (0, end) for box, _ in clipped)]
    if not boxes or len(partly_written_dims) > 2:
        return None
    written_extent = {dim: sum(box[dim][1] - box[dim][0] for box, _ in clipped) for dim in partly_written_dims}
    row_dim, column_dim = [*sorted(partly_written_dims, key=lambda dim: written_extent[dim]), None, None][:2]
    rectangles = [(_interval_along(box, row_dim), _interval_along(box, column_dim), number) for box, number in clipped]
    if len(rectangles) <= MAX_SINGLE_STRIPS:
        strips = [Strip(number, [Band(rows, columns)]) for rows, columns, number in rectangles]
    else:
        strips = group_into_strips(rectangles, 1 if column_dim is None else ends[column_dim])
    if len(strips) > MAX_INTERVALS:
        return None
    return _emit_selections(buffer, node, strips, _StripConditions(writer, node, row_dim, column_dim))


def _interval_along(box: Box, dim: int | None) -> Interval:
    """Return a box's interval along a dimension; [0, 1) if `dim` is None: the buffer counts as one row, or one column."""
    return (0, 1) if dim is None else box[dim]


def _emit_selections(buffer: fx.Node, node: fx.Node, strips: list[Strip], conditions: _StripConditions) -> fx.Node | None:
    """Emit where(element is in the strip, its constant, buffer) for one strip after the other, and return the last value.

    `buffer` is the value before all writes, `node` the last write. Return None if the condition of a strip cannot be emitted.
    """
    writer, value = conditions.writer, node.meta[VALUE]
    for strip in strips:
        number: float = strip.number
        if not value.is_floating_point():
            number = bool(number) if value.dtype == torch.bool else int(number)
        strip_conditions = conditions.emit(strip)
        if strip_conditions is None:
            return None
        fill = writer.call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
        if strip_conditions:
            buffer = writer.call(aten.where.self, strip_conditions[0], fill, buffer)
        else:
            buffer = writer.call(aten.expand.default, fill, size_arguments(node, writer))
    return buffer


# -- which boxes are written


def _find_writes(node: fx.Node, last_base: fx.Node | None = None) -> tuple[fx.Node, list[tuple[Box, float]]]:
    """Return the buffer before the first of a chain of constant writes, and (box, constant) of all writes in order.

    The chain ends with `node`: each write's buffer is the write before it. It starts after `last_base`, if that is in it.
    """
    writes = []
    while node is not last_base and (boxes := _match_written_boxes(node)) is not None:
        writes.append(boxes)
        node = node_argument(node)
    return node, [item for boxes in reversed(writes) for item in boxes]


def _match_written_boxes(node: fx.Node) -> list[tuple[Box, float]] | None:
    """Return the boxes that one operator writes, as (box, constant) in order; None if it writes anything but constants.

    The written value is a constant, or constants were written into a constant or into a view of the same rows of the buffer:
    x[r][: r - 2] = c writes row r of x after a slice of it was overwritten.
    """
    write = row_write(node) if node.target in OVERWRITES else None
    target_rows = _static_rows(write)
    if write is None or target_rows is None:
        return None
    base, rows, is_single_row = node_argument(node), write.part, write.is_single
    dim, low, high = target_rows
    boxes: list[tuple[Box, float]] = []
    number = _find_constant(rows)
    if number is None:
        view_before = (
            node_argument(base, 1) if base.target is node.target and _static_rows(row_write(base)) == target_rows else None
        )
        root, boxes = _find_writes(rows, view_before)
        number = _find_constant(root) if boxes else None
        if not boxes or (
            number is None and root is not view_before and not _is_view_of_buffer(root, is_single_row, target_rows, base)
        ):
            return None
    if number is not None:
        boxes = [(((0, END),) * len(shape_of_node(rows)), number), *boxes]
    # from boxes of the written rows to boxes of the buffer
    if is_single_row:
        return [((*box[:dim], (low, high), *box[dim:]), number) for box, number in boxes]
    shifted = [(box, (low + box[dim][0], min(low + min(box[dim][1], END - low), high)), number) for box, number in boxes]
    return [((*box[:dim], interval, *box[dim + 1 :]), number) for box, interval, number in shifted]


def _static_rows(move: RowMove | None) -> RowSlice | None:
    """Return the rows of a write or read with static bounds: `END` is the end of a dynamic dimension. None if there are none."""
    if move is None:
        return None
    dim, start, stop = move.rows
    is_end = not isinstance(stop, int) and stop == shape_of_node(move.tensor)[dim]
    rows = RowSlice(dim, start, END if is_end else stop)
    return rows if rows.is_static else None


def _is_view_of_buffer(view: fx.Node, is_single_row: bool, rows: RowSlice, base: fx.Node) -> bool:
    """Return whether `view` holds these rows of the buffer `base` (a single row without its dimension if `is_single_row`).

    The view may be of the buffer, of a value that was written there, or of the buffer before writes to other rows. So walk
    back over the writes that led to `base`, as long as they wrote other rows.
    """
    read = row_read(view)
    if read is None or read.is_single != is_single_row:
        return False
    viewed, viewed_rows = read.tensor, _static_rows(read)
    while viewed is not base or viewed_rows != rows:
        write = row_write(base) if base.target in OVERWRITES else None
        written = _static_rows(write)
        if write is None or written is None or written.dim != rows.dim:
            return False
        if not write.is_single and viewed is write.part:  # a view of the written value
            return written.contains(rows) and viewed_rows == (rows.dim, rows.start - written.start, rows.stop - written.start)
        if not written.is_disjoint(rows):
            return False
        base = node_argument(base)
    return True


def _find_constant(rows: fx.Node) -> float | None:
    """Return the number that all elements of a value equal, exactly in its dtype; None if it is not known to be a constant."""
    while rows.target in MOVES_ELEMENTS:
        rows = node_argument(rows)
    if rows.target is aten.zero.default:
        return 0.0
    if not is_kind(rows, Kind.OVERWRITE):
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


class _StripConditions:
    """Emits, for a strip, the condition that an element of the buffer lies in it, from arange over rows and columns."""

    def __init__(self, writer: GraphWriter, like: fx.Node, row_dim: int | None, column_dim: int | None) -> None:
        """Store a tensor of the buffer's shape, and its dimensions of rows and columns; None counts as one row or column."""
        self.writer, self._like, self._row_dim, self._column_dim = writer, like, row_dim, column_dim
        self._num_rows, self._num_columns = self._size(row_dim), self._size(column_dim)

    def emit(self, strip: Strip) -> list[fx.Node] | None:
        """Emit the condition that an element lies in a strip: start of the row's interval <= its column < end.

        The start and end are lines over row indices if lines fit all rows, else tables with an entry per row. Return a list
        with the condition, empty if it is always true; None if it cannot be expressed (a table over dynamically many rows).
        """
        first_row, end_row = strip.rows
        low, high = (fit_line(strip.edge(side), self._num_columns) for side in (0, 1))
        if low is None or high is None or not are_adjacent(strip.bands) or (end_row == END and (low.factor or high.factor)):
            tables = [] if self._num_rows == END else [self._emit_column_table(strip.edge(side)) for side in (0, 1)]
            if self._column_dim is None:  # the only column, 0, is in the strip if the end of the row's interval is > 0
                return [self.writer.call(aten.gt.Scalar, table, 0) for table in tables[1:]] or None
            comparisons = [
                self._emit_comparison(comparison, table) for comparison, table in zip(("ge", "lt"), tables, strict=False)
            ]
            return self._emit_conjunction(comparisons) or None
        conditions = list[fx.Node]()
        rows = range(min(self._num_rows, first_row + 1 if end_row == END else end_row))  # where the lines are compared
        if self._is_empty_outside(low, high, first_row, end_row):
            rows = range(min(self._num_rows, END - 1)) if end_row != END else rows
        else:
            conditions = self._emit_row_conditions(first_row, end_row)
            rows = rows[first_row:]
        conditions += [self._emit_comparison("ge", low)] if any(low.at(row) > 0 for row in rows) else []
        conditions += [self._emit_comparison("lt", high)] if any(high.at(row) < self._num_columns for row in rows) else []
        return self._emit_conjunction(conditions)

    def _is_empty_outside(self, low: ColumnLine, high: ColumnLine, start: int, end: int) -> bool:
        """Return whether no column is between the two lines in rows before `start` and from `end` on.

        Then the strip needs no condition on the row index.
        """
        if self._num_rows == END:
            return start == 0 and end == END
        outside = (*range(start), *range(end, self._num_rows))
        return all(clamp(low.at(row), self._num_columns) >= clamp(high.at(row), self._num_columns) for row in outside)

    def _emit_row_conditions(self, start: int, end: int) -> list[fx.Node]:
        """Emit the conditions start <= row index < end; a bound that all rows satisfy has no condition."""
        if end == start + 1:
            return [self.writer.call(aten.eq.Scalar, self._emit_indices(self._row_dim), start)]
        bounds = ((aten.ge.Scalar, start, start > 0), (aten.lt.Scalar, end, end < self._num_rows))
        return [
            self.writer.call(target, self._emit_indices(self._row_dim), bound) for target, bound, is_needed in bounds if is_needed
        ]

    def _emit_comparison(self, comparison: str, edge: ColumnLine | fx.Node) -> fx.Node:
        """Emit `column index >= edge` ("ge") or `column index < edge` ("lt"), broadcastable to the buffer's shape.

        `edge` gives a column for each row: a line (a constant if its factor is 0), or a node with these columns.
        """
        column_indices, overloads = self._emit_indices(self._column_dim), getattr(aten, comparison)
        if isinstance(edge, fx.Node):
            return self.writer.call(overloads.Tensor, column_indices, edge)
        if edge.factor == 0:
            return self.writer.call(overloads.Scalar, column_indices, edge.offset)
        return self.writer.call(overloads.Tensor, column_indices, self._emit_columns_of_line(edge))

    def _emit_columns_of_line(self, line: ColumnLine) -> fx.Node:
        """Emit the column of a line for each row: (row + shift) // block * factor + offset."""
        columns = self._emit_indices(self._row_dim)
        for operation, operand, neutral in (
            (aten.add.Tensor, line.shift, 0),
            (aten.floor_divide.default, line.block, 1),
            (aten.mul.Tensor, line.factor, 1),
            (aten.add.Tensor, line.offset, 0),
        ):
            columns = columns if operand == neutral else self.writer.call(operation, columns, operand)
        return columns

    def _emit_column_table(self, edge: list[Point]) -> fx.Node:
        """Emit a table with the column of an edge for each row, 0 for rows without an interval.

        It takes few operators: 0 0 0 4 5 6 -> cat([full(3, 0), arange(4, 7)]).
        """
        column_by_row, keywords = dict(edge), {"dtype": torch.int64, "device": self._like.meta[VALUE].device}
        columns = [column_by_row.get(row, 0) for row in range(self._num_rows)]
        segments = list[fx.Node]()
        start = 0
        while start < len(columns):  # the next segment has rows [start, stop), whose columns increase by `step`
            stop = start + 1
            step = columns[stop] - columns[start] if stop < len(columns) else 0
            while stop < len(columns) and columns[stop] - columns[stop - 1] == step:
                stop += 1
            low, high = columns[start], columns[stop - 1] + step
            is_arange = step and stop - start > 1
            segment = (aten.arange.start_step, low, high, step) if is_arange else (aten.full.default, [stop - start], low)
            segments.append(self.writer.call(*segment, **keywords))
            start = stop
        return self._emit_broadcast(self.writer.call(aten.cat.default, segments), self._row_dim)

    def _emit_indices(self, dim: int | None) -> fx.Node:
        """Emit the indices along dimension `dim` of the buffer (None: the first), broadcastable to the buffer's shape."""
        size = size_arguments(self._like, self.writer)[dim or 0]
        return self._emit_broadcast(self.writer.call(aten.arange.default, size, device=self._like.meta[VALUE].device), dim)

    def _emit_broadcast(self, vector: fx.Node, dim: int | None) -> fx.Node:
        """Append dimensions of size one to a vector over dimension `dim`, so that it broadcasts to the buffer's shape."""
        for position in range(1, len(shape_of_node(self._like)) - (dim or 0)):
            vector = self.writer.call(aten.unsqueeze.default, vector, position)
        return vector

    def _emit_conjunction(self, conditions: list[fx.Node]) -> list[fx.Node]:
        """Emit the `logical_and` of all conditions; return it as a list of one node, or the empty list without conditions."""
        return [reduce(partial(self.writer.call, aten.logical_and.default), conditions)] if conditions else []

    def _size(self, dim: int | None) -> int:
        """Return the size of a dimension; 1 if there is none, `END` if it is dynamic."""
        size = 1 if dim is None else shape_of_node(self._like)[dim]
        return size if isinstance(size, int) else END
