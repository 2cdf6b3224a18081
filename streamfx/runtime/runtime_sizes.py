"""Sizes at run time: expressions over the graph's symbols (dynamic sizes) and the bounds of the current chunk.

A chunk is rows [start, stop) of a sequence of `length` rows. A derived axis has `num_rows` rows: row i is row i * block +
offset of the sequence. A shifted axis is read by an operator that computes a derived axis: for row i, rows i + shift .. i
+ shift + reach. A span is the rows [start + low, stop + high): the keys that a chunk sees.

In expressions, sympy functions such as `member_count` represent these numbers. In generated code, a bounds function such as
`member_bounds` computes both numbers of an axis: the first row in the chunk, and the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
import torch

from streamfx.ir.program import START, STOP, RowRange, ShiftedRows
from streamfx.ir.sizes import Real, Size, Truth, free_symbols, simplified
from streamfx.ir.span import Span
from streamfx.torch_private import PythonPrinter

_cached = lru_cache(1 << 12)  # equal layers have equal sizes, and sympy is slow


class member_count(sympy.Function):
    """member_count(start, stop, length, offset, num_rows, block=1): the number of rows of a derived axis in a chunk."""


class member_start(sympy.Function):
    """The first row of a derived axis that belongs to a chunk; same arguments as `member_count`."""


class span_count(sympy.Function):
    """span_count(start, stop, length, low, high, offset, num_rows): the number of rows of a span; its bounds may be infinite."""


class span_start(sympy.Function):
    """The first row of a span; same arguments as `span_count`."""


class shifted_count(sympy.Function):
    """The number of rows of a shifted axis, with `num_read_rows` rows in all, that an operator reads for a chunk.

    shifted_count(start, stop, length, offset, num_rows, shift, num_read_rows, reach=0, block=1), where (offset, num_rows, block)
    is the derived axis that the operator computes from the shifted axis.
    """


class shifted_start(sympy.Function):
    """The first row of a shifted axis in a chunk; same arguments as `shifted_count`."""


class chunks_holding(sympy.Function):
    """chunks_holding(num_rows, step): the number of chunks of `step` rows that are needed for `num_rows` rows, rounded up."""


class shifted_before(sympy.Function):
    """The number of rows that a chunk would read before row 0 of a shifted axis; same arguments as `shifted_count`."""


def member_bounds(start: int, stop: int, length: int, offset: int, num_rows: int, block: int = 1) -> tuple[int, int]:
    """Return the first row and the number of rows of a derived axis in chunk [start, stop).

    The first chunk also has the rows before the sequence, and the last chunk the rows after it, so each row is in exactly
    one chunk. Chunk [4, 8) of 8, with 10 rows from offset -1 on (two more than the sequence): (5, 5).
    """
    assert block == 1 or start == 0 or (start - offset) % block == 0, "a chunk begins inside a block"
    first = 0 if start == 0 else min(max((start - offset) // block, 0), num_rows)
    last = num_rows if stop == length else min(max((stop - offset) // block, 0), num_rows)
    return first, max(last - first, 0)


def span_bounds(
    start: int, stop: int, length: int, low: int | None, high: int | None, offset: int, num_rows: int
) -> tuple[int, int]:
    """Return the first row and the number of rows of the span [start + low, stop + high) in a derived axis; None: unbounded.

    The first chunk also has the rows before the sequence, and the last chunk the rows after it, so their spans extend
    to the end of the axis.
    """
    first = 0 if low is None or start == 0 else min(max(start + low - offset, 0), num_rows)
    last = num_rows if high is None or stop == length else min(max(stop + high - offset, 0), num_rows)
    return first, max(last - first, 0)


def shifted_bounds(
    start: int, stop: int, length: int, offset: int, num_rows: int, shift: int, num_read_rows: int, reach: int = 0, block: int = 1
) -> tuple[int, int]:
    """Return the first row and the number of rows, of an axis with `num_read_rows` rows, that a chunk of another axis reads.

    The chunk has rows of the derived axis (offset, num_rows, block). Its row i reads rows i + shift .. i + shift + reach, as
    far as they exist.
    """
    first, count = member_bounds(start, stop, length, offset, num_rows, block)
    low, high = min(max(first + shift, 0), num_read_rows), min(max(first + count + shift + reach, 0), num_read_rows)
    return low, high - low


def rows_before(
    start: int, stop: int, length: int, offset: int, num_rows: int, shift: int, num_read_rows: int, reach: int = 0, block: int = 1
) -> int:
    """Return how many rows that a chunk would read from a shifted axis are before its row 0; arguments as in `shifted_bounds`.

    They do not exist: a convolution reads zeros there.
    """
    first, count = member_bounds(start, stop, length, offset, num_rows, block)
    return min(max(-first - shift, 0), count + reach)


@_cached
def rows_in_chunk(row_range: RowRange, length: Size) -> Size:
    """Return the number of rows of a derived axis in the current chunk, as an expression; `length`: rows of the sequence."""
    if row_range.offset == 0 and row_range.length == length and row_range.block == 1:
        return STOP - START
    return member_count(START, STOP, length, *_member_arguments(row_range))


@_cached
def first_in_chunk(row_range: RowRange, length: Size) -> Size:
    """Return the first row of a derived axis in the current chunk, as an expression; `length`: rows of the sequence."""
    if row_range.offset == 0 and row_range.length == length and row_range.block == 1:
        return START
    return member_start(START, STOP, length, *_member_arguments(row_range))


def _member_arguments(row_range: RowRange) -> tuple[Any, ...]:
    """Return the arguments of a size function that describe a derived axis: (offset, length), and the block unless it is 1."""
    return (row_range.offset, row_range.length, row_range.block) if row_range.block != 1 else (row_range.offset, row_range.length)


@_cached
def rows_shifted(shifted: ShiftedRows, num_rows: Size, length: Size) -> Size:
    """Return the number of rows that the current chunk reads of a shifted axis with `num_rows` rows, as an expression."""
    return shifted_count(START, STOP, length, *_shift_arguments(shifted, num_rows))


@_cached
def first_shifted(shifted: ShiftedRows, num_rows: Size, length: Size) -> Size:
    """Return the first row that the current chunk reads of a shifted axis with `num_rows` rows, as an expression."""
    return shifted_start(START, STOP, length, *_shift_arguments(shifted, num_rows))


@_cached
def rows_before_shifted(shifted: ShiftedRows, num_rows: Size, length: Size) -> Size:
    """Return the number of rows that the current chunk would read before row 0 of a shifted axis, as an expression."""
    return shifted_before(START, STOP, length, *_shift_arguments(shifted, num_rows))


def _shift_arguments(shifted: ShiftedRows, num_rows: Size) -> tuple[Any, ...]:
    """Return the arguments of a size function that describe a shift, from `offset` on; default reach and block are omitted."""
    block = shifted.rows.block
    window = (shifted.reach, block) if block != 1 else (shifted.reach,) if shifted.reach else ()
    return shifted.rows.offset, shifted.rows.length, shifted.by, num_rows, *window


@_cached
def rows_in_span(row_range: RowRange, span: Span, length: Size) -> Size:
    """Return the number of rows of the current chunk's span in a derived axis, as an expression."""
    return span_count(START, STOP, length, *_bound_arguments(span), row_range.offset, row_range.length)


@_cached
def first_in_span(row_range: RowRange, span: Span, length: Size) -> Size:
    """Return the first row of the current chunk's span in a derived axis, as an expression."""
    return span_start(START, STOP, length, *_bound_arguments(span), row_range.offset, row_range.length)


def _bound_arguments(span: Span) -> tuple[Any, Any]:
    """Return a span's low and high bound; minus and plus infinity if absent."""
    return (-sympy.oo if span.low is None else span.low, sympy.oo if span.high is None else span.high)


def compiled_size(size: Size) -> Callable[[dict[str, Any]], Any]:
    """Compile an expression (a size, a real number or a truth value) to a function of a dictionary: symbol names to values."""
    names = sorted(symbol.name for symbol in free_symbols([size]))
    code = f"lambda {', '.join(names)}: {SizePrinter().doprint(simplified(size))}"
    function = eval(code, dict(FUNCTIONS))
    kind = kind_of_size(size)
    return lambda env: kind(function(*(env[name] for name in names)))


def kind_of_size(size: Size) -> Callable[[Any], Any]:
    """Return the Python type to which the value of the expression is converted: float, bool, or int for a size."""
    kinds: dict[type, Callable[[Any], Any]] = {Real: float, Truth: bool}
    return kinds.get(type(size), int)


class SizePrinter(PythonPrinter):  # type: ignore[misc]
    """Prints an expression as Python source that calls the size functions in `FUNCTIONS`; an infinite bound is None."""

    def _print_Function(self, expression: Any) -> str:
        arguments = ", ".join(self._print(argument) for argument in expression.args)
        return f"{type(expression).__name__}({arguments})"

    def _print_Infinity(self, expression: Any) -> str:
        return "None"

    def _print_NegativeInfinity(self, expression: Any) -> str:
        return "None"


# keyed by size function: the bounds function, and the index of the value in its result. "member_count": ("member_bounds", 1)
BOUNDS: dict[str, tuple[str, int]] = {
    f"{kind}_{part}": (f"{kind}_bounds", result_index)
    for kind in ("member", "span", "shifted")
    for result_index, part in enumerate(("start", "count"))
}


def _item_of(function: Callable[..., tuple[int, int]], index: int) -> Callable[..., int]:
    """Return a function that returns one item of the result of a bounds function."""
    return lambda *arguments: function(*arguments)[index]


FUNCTIONS: dict[str, Any] = {
    "math": math,
    "torch": torch,
    "Real": float,
    "Truth": bool,
    "chunks_holding": lambda num_rows, step: -(-num_rows // step),
    "shifted_before": rows_before,
    "member_bounds": member_bounds,
    "span_bounds": span_bounds,
    "shifted_bounds": shifted_bounds,
}
FUNCTIONS |= {name: _item_of(FUNCTIONS[function], part) for name, (function, part) in BOUNDS.items()}


class SizeOf(torch.nn.Module):
    """Computes a size from the values of its symbols, inside a host program (the graph that runs the loops over chunks)."""

    def __init__(self, size: Size, symbols: tuple[sympy.Symbol, ...]) -> None:
        super().__init__()
        self.expression, self.names = size, tuple(symbol.name for symbol in symbols)
        self._function = compiled_size(size)

    def forward(self, *values: Any) -> Any:
        """Return the size, from the values of its symbols in the order of `names`."""
        scalars = [float(value) if isinstance(value, (float, torch.SymFloat)) else int(value) for value in values]
        return self._function(dict(zip(self.names, scalars, strict=True)))

    def extra_repr(self) -> str:
        return str(self.expression)
