"""Which rows of which nodes is this? The rows that an operator reads or writes, and the rows of which a value consists.

    x[:, 2:5]    x.split(3, 1)[1]    x[:, 4]    x.unbind(1)[4]           read rows of x
    constant_pad_nd(x, [0, 0, -2, -1])                                   the same
    slice_scatter(y, v, 1, 2, 5)     select_scatter(y, v, 1, 4)          write v into rows of y
    slice_backward(v, ...)           select_backward(v, ...)             write v into rows of zeros
    constant_pad_nd(v, [0, 0, 2, 1], 7.0)                                write v into rows of sevens

    cat([a, b, c], 1)[:, 2:5]                                            row 2 of a, then rows [0, 2) of b

Rows are the indices along one dimension, which may be any. All rules on such operators ask this file, so that each applies to
all operators that move rows, whichever of them a model uses.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, int_argument, is_tensor, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.sizes import Size, shape_of
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.ops.rules.views import slice_start

aten = torch.ops.aten
MIN_LOOP_ROWS = 3  # two rows are more likely to be two halves of a value than the steps of a loop
SINGLE = of_kind(Kind.SELECT, Kind.UNBIND) | {aten.select_scatter.default, aten.select_backward.default}
READS = of_kind(Kind.SLICE, Kind.SELECT)
OVERWRITES = of_kind(Kind.OVERWRITE_ROWS)
EMBEDS = of_kind(Kind.PAD) | {aten.slice_backward.default, aten.select_backward.default}
# the results of all others consist of no other value's rows (`find_sources`)
MOVES_ROWS = READS | OVERWRITES | EMBEDS | of_kind(Kind.CONCAT, Kind.STACK) | {operator.getitem, aten.add.Tensor}


class RowSlice(NamedTuple):
    """Rows [start, stop) along dimension `dim`."""

    dim: int
    start: Any  # an integer, or an expression of dynamic sizes
    stop: Any

    @property
    def is_static(self) -> bool:
        """Whether the bounds are integers."""
        return isinstance(self.start, int) and isinstance(self.stop, int)

    def contains(self, other: RowSlice) -> bool:
        """Return whether these rows contain other rows of the same dimension; both are static."""
        return self.dim == other.dim and self.start <= other.start and other.stop <= self.stop

    def is_disjoint(self, other: RowSlice) -> bool:
        """Return whether these rows do not overlap other rows of the same dimension; both are static."""
        return self.dim == other.dim and (self.stop <= other.start or other.stop <= self.start)


class RowMove(NamedTuple):
    """Rows `rows` of `tensor` are `part`; if `is_single`, the part is one row, without the dimension of rows.

    A read returns the part. A write returns the tensor; its other rows are those of `rest` (a number: all its elements).
    """

    tensor: fx.Node
    rows: RowSlice
    part: fx.Node
    is_single: bool
    rest: fx.Node | float | None  # None: it is a read


def is_static_shape(shape: Iterable[Size]) -> bool:
    """Return whether all sizes of a shape are static."""
    return all(isinstance(size, int) for size in shape)


def row_read(node: fx.Node) -> RowMove | None:
    """Return the rows that a node reads; None if it is not known to read rows with step 1."""
    if node.target in READS or is_kind(node, Kind.PAD):
        return _move(node, node, node_argument(node), node, None)
    if node.target is not operator.getitem or not is_kind(node_argument(node), Kind.SPLIT, Kind.UNBIND):
        return None
    return _move(node, node_argument(node), node_argument(node_argument(node)), node, None)


def row_write(node: fx.Node) -> RowMove | None:
    """Return the rows that a node writes; None if it is not known to write rows with step 1, of its own type.

    A padding writes rows if it is along one dimension, and removes no rows.
    """
    if node.target in OVERWRITES:
        return _move(node, node, node, node_argument(node, 1), node_argument(node))
    if node.target in EMBEDS:
        number = bound_arguments(node)["value"] if is_kind(node, Kind.PAD) else 0.0
        return _move(node, node, node, node_argument(node), float(number)) if isinstance(number, (int, float)) else None
    return None


def _move(node: fx.Node, by: fx.Node, tensor: fx.Node, part: fx.Node, rest: fx.Node | float | None) -> RowMove | None:
    """Return the move of rows between `part` and `tensor` by the operator `by`, of which `node` is a result.

    Return None if the first row is not known, or if the move has a step, converts or broadcasts.
    """
    shape, part_shape, is_single = shape_of_node(tensor), shape_of_node(part), by.target in SINGLE
    if not shape or bound_arguments(by).get("step", 1) != 1 or not has_same_type(part, tensor):
        return None
    dim, start = _first_row(node, by, tensor)
    if start is None:
        return None
    if isinstance(start, int) and isinstance(shape[dim], int):
        start = min(start, shape[dim])
    other_sizes = part_shape if is_single else (*part_shape[:dim], *part_shape[dim + 1 :])
    pairs = zip(other_sizes, (*shape[:dim], *shape[dim + 1 :]), strict=True)
    if any(isinstance(size, int) and isinstance(other, int) and size != other for size, other in pairs):
        return None
    return RowMove(tensor, RowSlice(dim, start, start + (1 if is_single else part_shape[dim])), part, is_single, rest)


def _first_row(node: fx.Node, by: fx.Node, tensor: fx.Node) -> tuple[int, Size | None]:
    """Return the dimension along which the operator `by` moves rows of `tensor`, and the first row; None if it is not known."""
    arguments, rank = bound_arguments(by), len(shape_of_node(tensor))
    if is_kind(by, Kind.PAD):  # the numbers of rows before and after for each dimension, the last one first
        pads = arguments["pad"]
        padded = [index for index in range(0, len(pads), 2) if any(pads[index : index + 2])]
        sign = 1 if tensor is by else -1  # negative numbers remove rows
        is_known = len(padded) == 1 and all(isinstance(pad, int) and pad * sign >= 0 for pad in pads)
        return (rank - 1 - padded[0] // 2, pads[padded[0]] * sign) if is_known else (0, None)
    dim = arguments["dim"] % rank
    if node is not by:
        index = int_argument(node, 1)
        return dim, index if by.target in SINGLE else sum(shape_of(value)[dim] for value in by.meta[VALUE][:index])
    start = arguments["index" if by.target in SINGLE else "start"]
    is_number = isinstance(start, int) and start >= 0
    return dim, start if is_number else slice_start(start, tensor.meta[VALUE].shape[dim])


# -- the rows of which a value consists


@dataclass(frozen=True)
class Piece:
    """Rows [row, row + num_rows) of a value: they hold a constant, or rows [start, start + num_rows) of `value`.

    If `is_row`, `value` is a single row without the row dimension. If `is_added`, zeros were added, so -0.0 became 0.0.
    """

    row: int
    num_rows: int
    value: fx.Node | float
    start: int
    is_row: bool = False
    is_added: bool = False

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.row + self.num_rows

    def clip(self, low: int, high: int) -> Piece:
        """Return the part of the piece in rows [low, high); if it is empty, `num_rows` is zero or negative."""
        begin, end = max(self.row, low), min(self.stop, high)
        return replace(self, row=begin, num_rows=end - begin, start=self.start + begin - self.row)

    def after_addition(self) -> Piece:
        """Return the piece after zeros are added."""
        return replace(self, is_added=True) if isinstance(self.value, fx.Node) else replace(self, value=self.value + 0.0)

    def is_continued_by(self, other: Piece) -> bool:
        """Return whether the next piece has the next rows of the same value."""
        is_alike = self.value is other.value and self.is_added == other.is_added and not self.is_row and not other.is_row
        return is_alike and isinstance(self.value, fx.Node) and self.start + self.num_rows == other.start

    def has_all_rows(self, dim: int) -> bool:
        """Return whether the piece holds all rows of its value, whose dimension of rows is `dim`; False for a constant."""
        if not isinstance(self.value, fx.Node):
            return False
        return self.is_row or self.num_rows == shape_of_node(self.value)[dim]


def find_pieces(value: fx.Node, rows: RowSlice) -> list[Piece]:
    """Return the pieces that make up rows of a value, in order; the rows and the value's shape are static.

    Walk back over the writes, concatenations and sums that led to it, the last one first. Each fills the rows that no later
    one has filled (`open_rows`); a constant, or else the value before all of them, fills the rest.
    """
    pieces: list[Piece] = []
    open_rows, rest = [(rows.start, rows.stop)], value
    while open_rows and isinstance(rest, fx.Node) and (found := _last_pieces(rest, rows.dim)) is not None:
        last, rest = found  # type: ignore[assignment]
        for piece in last:
            clipped = [(interval, piece.clip(*interval)) for interval in open_rows]
            pieces += [part for _, part in clipped if part.num_rows > 0]
            open_rows = []
            for interval, part in clipped:
                begin, end = interval
                around = [(begin, part.row), (part.stop, end)] if part.num_rows > 0 else [interval]
                open_rows += [(first, stop) for first, stop in around if first < stop]
    fill = find_fill(rest) if isinstance(rest, fx.Node) else rest
    pieces += [Piece(begin, end - begin, rest if fill is None else fill, begin) for begin, end in open_rows]
    return sorted(pieces, key=lambda piece: piece.row)


def _last_pieces(value: fx.Node, dim: int) -> tuple[list[Piece], fx.Node | float | None] | None:
    """Return the rows along `dim` that one operator writes, concatenates or adds, and what its other rows are.

    The other rows are those of a value, a number, or None if there are none. Return None for any other operator, or if it
    moves rows along another dimension.
    """
    if is_kind(value, Kind.CONCAT, Kind.STACK):
        return _concatenated(value, dim)
    if value.target is aten.add.Tensor:
        return _added(value, dim)
    move = row_write(value)
    return None if move is None or not _is_along(move, dim) else ([_piece_of(move)], move.rest)


def is_plus_zero(number: Any) -> bool:
    """Return whether a number is 0.0: adding -0.0 would keep the sign of a zero."""
    return isinstance(number, float) and number == 0.0 and math.copysign(1.0, number) > 0.0


def _is_along(move: RowMove, dim: int) -> bool:
    """Return whether a write is along dimension `dim`, and its bounds are static."""
    return move.rows.dim == dim and move.rows.is_static


def _piece_of(move: RowMove, is_added: bool = False) -> Piece:
    """Return the piece that a write writes."""
    return Piece(move.rows.start, move.rows.stop - move.rows.start, move.part, 0, move.is_single, is_added)


def _concatenated(value: fx.Node, dim: int) -> tuple[list[Piece], None] | None:
    """Return the operands of a `cat` or `stack` along `dim` as pieces; None if it is along another dimension, or converts."""
    operands: Any = value.args[0]
    rank, is_row = len(shape_of_node(value)), is_kind(value, Kind.STACK)
    if bound_arguments(value)["dim"] % rank != dim or not all(has_same_type(operand, value) for operand in operands):
        return None
    pieces, row = list[Piece](), 0
    for operand in operands:
        if is_row or len(shape_of_node(operand)) == rank:  # `cat` ignores empty vectors
            num_rows = 1 if is_row else shape_of_node(operand)[dim]
            if not isinstance(num_rows, int):
                return None
            pieces.append(Piece(row, num_rows, operand, 0, is_row))
            row += num_rows
    return pieces, None


def _added(value: fx.Node, dim: int) -> tuple[list[Piece], float] | None:
    """Return the rows of a sum that come from one addend, because the others are padded there with zeros; other rows are zeros.

    Rows of several addends are rows of the sum itself. Return None if no addend is padded along `dim`.
    """
    length, pieces, is_padded = shape_of_node(value)[dim], list[Piece](), False
    for addend in nested_addends(value):
        move = row_write(addend)
        if move is not None and _is_along(move, dim) and is_plus_zero(move.rest):
            pieces.append(_piece_of(move, is_added=True))
            is_padded = True
        else:
            pieces.append(Piece(0, length, addend, 0, is_added=True))  # type: ignore[arg-type]
    if not is_padded or not isinstance(length, int):
        return None
    bounds = sorted({bound for piece in pieces for bound in (piece.row, piece.stop)})
    pieces_at: dict[int, list[Piece]] = {bound: [] for bound in bounds[:-1]}  # by first row of an interval between bounds
    for piece in pieces:
        for bound in bounds[bisect_left(bounds, piece.row) : bisect_left(bounds, piece.stop)]:
            pieces_at[bound].append(piece)
    found = list[Piece]()
    for low, high in pairwise(bounds):
        if len(pieces_at[low]) == 1:
            found.append(pieces_at[low][0].clip(low, high))
        elif pieces_at[low]:
            begin = found.pop().row if found and found[-1].value is value else low
            found.append(Piece(begin, high - begin, value, begin))
    return found, 0.0


def find_sources(value: fx.Node, rows: RowSlice, opaque: fx.Node | None = None) -> list[Piece]:
    """Return the pieces that make up rows of a value, traced back through slices and through the values of `find_pieces`.

    Adjacent rows of one value are one piece: cat([x[:2], x[2:]]) consists of all rows of x. Rows of `opaque` are not traced.
    """
    sources, todo = list[Piece](), [Piece(rows.start, rows.stop - rows.start, value, rows.start)]
    while todo:
        piece = todo.pop()
        origins = None if piece.value is opaque else _origins(piece, rows.dim)
        if origins is not None:
            todo += reversed(origins)
        elif sources and sources[-1].is_continued_by(piece):
            sources[-1] = replace(sources[-1], num_rows=sources[-1].num_rows + piece.num_rows)
        else:
            sources.append(piece)
    return sources


def _origins(piece: Piece, dim: int) -> list[Piece] | None:
    """Return the pieces that make up a piece; None if it is a constant, a single row, or rows of an opaque value."""
    if not isinstance(piece.value, fx.Node) or piece.is_row:
        return None
    read = row_read(piece.value)
    if read is not None and not read.is_single and read.rows.dim == dim and read.rows.is_static:
        return [replace(piece, value=read.tensor, start=piece.start + read.rows.start)]
    found = find_pieces(piece.value, RowSlice(dim, piece.start, piece.start + piece.num_rows))
    if [source.value for source in found] == [piece.value]:
        return None
    found = [replace(source, row=source.row - piece.start + piece.row) for source in found]
    return [source.after_addition() for source in found] if piece.is_added else found


# -- sums


def is_same_type_addition(node: fx.Node) -> bool:
    """Return whether two tensors of equal shape and dtype are added, without broadcasting, conversion or scaling."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    values = [item.meta[VALUE] for item in (*node.args, node) if is_tensor(item)]  # type: ignore[union-attr]
    return len(values) == 3 and len({(shape_of(value), value.dtype) for value in values}) == 1


def nested_addends(total: fx.Node, is_partial: Callable[[fx.Node], bool] = lambda node: True) -> list[fx.Node]:
    """Return the addends of a nested sum, the last one first: c, b and a for (a + b) + c. An addend may occur twice.

    Addends that are sums are decomposed if `is_partial` is true for them, each once: a sum that occurs a second time is an
    addend, because decomposing y + y again and again takes exponential time.
    """
    addends, todo, decomposed = list[fx.Node](), [total], set[fx.Node]()
    while todo:
        value = todo.pop()
        if is_same_type_addition(value) and value not in decomposed and (value is total or is_partial(value)):
            decomposed.add(value)
            todo.extend(value.args)  # type: ignore[arg-type]
        else:
            addends.append(value)
    return addends


class PaddedSum(NamedTuple):
    """A sum with zero-padded addends: by their rows that are not padding, these addends in graph order; and the other addends."""

    total: fx.Node
    padded: dict[RowSlice, list[RowMove]]
    others: list[fx.Node]


def padded_sums(graph: fx.Graph, padding: Any) -> Iterator[PaddedSum]:
    """Yield the sums of results of `padding`, which pads rows with zeros. Partial sums that are used once are decomposed.

    Autograd adds such gradients if a loop reads rows one by one, or block by block. The caller may replace each sum before the
    next one, of which it may be an addend.
    """
    partial_sums: dict[fx.Node, None] = {}  # the padded gradients, and all sums with one of them
    for node in graph.nodes:
        if node.target is padding or (is_same_type_addition(node) and any(item in partial_sums for item in node.args)):
            partial_sums[node] = None
    order = {node: i for i, node in enumerate(graph.nodes)} if partial_sums else {}
    gradient_order = {node: order[node_argument(node)] for node in partial_sums if node.target is padding}
    for total in partial_sums:
        is_addend = len(total.users) == 1 and any(user in partial_sums and user.target is not padding for user in total.users)
        if total.target is padding or is_addend:
            continue
        padded, others = defaultdict[RowSlice, list[RowMove]](list), list[fx.Node]()
        addends = nested_addends(total, lambda node: node in partial_sums and len(node.users) == 1)
        for addend in sorted(addends, key=lambda node: gradient_order.get(node, -1)):
            move = row_write(addend) if addend.target is padding else None
            if move is not None and move.rows.is_static:
                padded[move.rows].append(move)
            else:
                others.append(addend)
        yield PaddedSum(total, padded, others)
