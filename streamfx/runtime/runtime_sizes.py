"""Sizes at run time: expressions over the graph's symbols and the bounds of the current chunk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from streamfx.ir.program import START, STOP, RowRange, ShiftedRows
from streamfx.ir.sizes import Real, Size, Truth, free_symbols, simplified
from streamfx.ir.span import Span
from streamfx.torch_private import PythonPrinter


class member_count(sympy.Function):
    """member_count(start, stop, length, offset, rows, block=1): how many rows of a member axis belong to a chunk."""


class member_start(sympy.Function):
    """The first row of a member axis that belongs to a chunk; same arguments as `member_count`."""


class span_count(sympy.Function):
    """span_count(start, stop, length, low, high, offset, rows): how many rows a span has; infinite bounds are unbounded."""


class span_start(sympy.Function):
    """The first row of a span; same arguments as `span_count`."""


class shifted_count(sympy.Function):
    """shifted_count(start, stop, length, offset, rows, by, own, reach, block): how many rows of an axis of `own` rows a chunk of
    another axis stands for."""


class shifted_start(sympy.Function):
    """The first of them; same arguments as `shifted_count`."""


class chunks_holding(sympy.Function):
    """chunks_holding(rows, step): how many chunks of so many rows hold so many rows."""


class shifted_before(sympy.Function):
    """How many of the chunk's rows lie before the first of them; same arguments as `shifted_count`."""


def member_bounds(start: int, stop: int, length: int, offset: int, rows: int, block: int = 1) -> tuple[int, int]:
    """First row and number of rows of a member axis in chunk [start, stop).

    The first chunk takes what lies before the sequence and the last what lies behind it, so each row is in one chunk.
    """
    assert block == 1 or start == 0 or (start - offset) % block == 0, "a chunk begins inside of a block"
    first = 0 if start == 0 else min(max((start - offset) // block, 0), rows)
    last = rows if stop == length else min(max((stop - offset) // block, 0), rows)
    return first, max(last - first, 0)


def span_bounds(start: int, stop: int, length: int, low: int | None, high: int | None, offset: int, rows: int) -> tuple[int, int]:
    """First row and number of rows of the span [start + low, stop + high) in a member axis.

    The first chunk has the rows that lie before the sequence, too, and the last those behind it: they see as far from there.
    """
    first = 0 if low is None or start == 0 else min(max(start + low - offset, 0), rows)
    last = rows if high is None or stop == length else min(max(stop + high - offset, 0), rows)
    return first, max(last - first, 0)


def shifted_bounds(
    start: int, stop: int, length: int, offset: int, rows: int, by: int, own: int, reach: int = 0, block: int = 1
) -> tuple[int, int]:
    """Rows of an axis of `own` rows that a chunk of the axis (offset, rows) stands for: row i is i + by .. i + by + reach."""
    first, count = member_bounds(start, stop, length, offset, rows, block)
    low, high = min(max(first + by, 0), own), min(max(first + count + by + reach, 0), own)
    return low, high - low


def rows_before(
    start: int, stop: int, length: int, offset: int, rows: int, by: int, own: int, reach: int = 0, block: int = 1
) -> int:
    """How many rows that the chunk asks for lie before row 0 of the other axis: all or none where the two do not meet."""
    first, count = member_bounds(start, stop, length, offset, rows, block)
    return min(max(-first - by, 0), count + reach)


def rows_in_chunk(rows: RowRange, length: Size) -> Size:
    """The number of rows of an axis in the current chunk, as an expression."""
    if rows.offset == 0 and rows.length == length and rows.block == 1:
        return STOP - START
    return member_count(START, STOP, length, *_member(rows))


def first_in_chunk(rows: RowRange, length: Size) -> Size:
    if rows.offset == 0 and rows.length == length and rows.block == 1:
        return START
    return member_start(START, STOP, length, *_member(rows))


def _member(rows: RowRange) -> tuple[Any, ...]:
    return (rows.offset, rows.length, rows.block) if rows.block != 1 else (rows.offset, rows.length)


def rows_shifted(shifted: ShiftedRows, own: Size, length: Size) -> Size:
    return shifted_count(START, STOP, length, *_shift(shifted, own))


def first_shifted(shifted: ShiftedRows, own: Size, length: Size) -> Size:
    return shifted_start(START, STOP, length, *_shift(shifted, own))


def rows_before_shifted(shifted: ShiftedRows, own: Size, length: Size) -> Size:
    return shifted_before(START, STOP, length, *_shift(shifted, own))


def _shift(shifted: ShiftedRows, own: Size) -> tuple[Any, ...]:
    block = shifted.rows.block
    window = (shifted.reach, block) if block != 1 else (shifted.reach,) if shifted.reach else ()
    return shifted.rows.offset, shifted.rows.length, shifted.by, own, *window


def rows_in_span(rows: RowRange, span: Span, length: Size) -> Size:
    """The number of rows of a span, as an expression."""
    return span_count(START, STOP, length, *_bounds(span), rows.offset, rows.length)


def first_in_span(rows: RowRange, span: Span, length: Size) -> Size:
    return span_start(START, STOP, length, *_bounds(span), rows.offset, rows.length)


def _bounds(span: Span) -> tuple[Any, Any]:
    return (-sympy.oo if span.low is None else span.low, sympy.oo if span.high is None else span.high)


def compiled_size(size: Size) -> Callable[[dict[str, Any]], Any]:
    """A function from the values of the symbols to the size, or to a number or a truth of another kind."""
    names = sorted(symbol.name for symbol in free_symbols([size]))
    code = f"lambda {', '.join(names)}: {SizePrinter().doprint(simplified(size))}"
    function = eval(code, dict(FUNCTIONS))
    kind = kind_of_size(size)
    return lambda env: kind(function(*(env[name] for name in names)))


def kind_of_size(size: Size) -> Callable[[Any], Any]:
    """What makes a size out of what its expression gives."""
    kinds: dict[type, Callable[[Any], Any]] = {Real: float, Truth: bool}
    return kinds.get(type(size), int)


class SizePrinter(PythonPrinter):  # type: ignore[misc]
    """Names functions of sizes as `FUNCTIONS` does."""

    def _print_Function(self, expression: Any) -> str:
        arguments = ", ".join(self._print(argument) for argument in expression.args)
        return f"{type(expression).__name__}({arguments})"

    def _print_Infinity(self, expression: Any) -> str:
        return "None"

    def _print_NegativeInfinity(self, expression: Any) -> str:
        return "None"


# The functions of sizes that are the first row, or the number of rows, that a function finds
BOUNDS: dict[str, tuple[str, int]] = {
    f"{kind}_{part}": (f"{kind}_bounds", position)
    for kind in ("member", "span", "shifted")
    for position, part in enumerate(("start", "count"))
}


def _part_of(function: Callable[..., tuple[int, int]], part: int) -> Callable[..., int]:
    return lambda *arguments: function(*arguments)[part]


FUNCTIONS: dict[str, Any] = {
    "math": math,
    "torch": torch,
    "Real": float,
    "Truth": bool,
    "chunks_holding": lambda rows, step: -(-rows // step),
    "shifted_before": rows_before,
    "member_bounds": member_bounds,
    "span_bounds": span_bounds,
    "shifted_bounds": shifted_bounds,
}
FUNCTIONS |= {name: _part_of(FUNCTIONS[function], part) for name, (function, part) in BOUNDS.items()}


class SizeOf(torch.nn.Module):
    """Computes a size from the values of its symbols, inside an outer graph."""

    def __init__(self, size: Size, symbols: tuple[sympy.Symbol, ...]) -> None:
        super().__init__()
        self.expression, self.names = size, tuple(symbol.name for symbol in symbols)
        self._function = compiled_size(size)

    def forward(self, *values: Any) -> Any:
        plain = [float(value) if isinstance(value, (float, torch.SymFloat)) else int(value) for value in values]
        return self._function(dict(zip(self.names, plain, strict=True)))

    def extra_repr(self) -> str:
        return str(self.expression)
