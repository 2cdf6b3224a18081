"""Sizes of dimensions: integers, or expressions in the symbols of a dynamic shape."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"


class Real(sympy.Function):
    """A number computed from sizes that need not be an integer, such as 1 / t."""


class Truth(sympy.Function):
    """A condition on sizes, such as t > 8."""


def size_of(dimension: Any) -> Size:
    """Convert a fake tensor's dimension (an `int` or a `SymInt`), or another number computed from sizes, to a `Size`.

    Numbers that need not be integers become a `Real`, conditions a `Truth`, so that they compare as expressions.
    """
    if isinstance(dimension, int):
        return dimension
    if isinstance(dimension, float):
        return Real(sympy.Float(dimension))
    if isinstance(dimension, torch.SymFloat):
        return Real(dimension.node.expr)
    return Truth(dimension.node.expr) if isinstance(dimension, torch.SymBool) else simplified(dimension.node.expr)


def simplified(expression: Any) -> Size:
    """Convert a constant expression to an integer; return any other expression unchanged."""
    return int(expression) if isinstance(expression, (int, sympy.Integer)) else expression


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes; 1 if there are none."""
    total: Size = 1
    for size in sizes:
        if type(size) is not int or size != 1:  # most are 1, and a product of expressions is slow
            total = size if type(total) is int and total == 1 else total * size
    return simplified(total)


def quotient(size: Size, divisor: Size) -> Size | None:
    """Return `size / divisor`; None unless it is provably an integer for every value of the symbols."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    ratio = sympy.cancel(size / divisor)
    numerator, denominator = sympy.fraction(ratio)
    return (
        simplified(numerator)
        if denominator == 1 and not numerator.atoms(sympy.Rational) - numerator.atoms(sympy.Integer)
        else None
    )


def is_at_least(size: Size, minimum: Size) -> bool:
    """Return whether a size is provably at least `minimum` for every value of the symbols."""
    return bool(sympy.expand(size - minimum).is_nonnegative)


def numeric(size: Size, symbol_value: int = 16) -> int:
    """Return a size as an integer, with the same typical value for each symbol: only to compare costs, never for correctness.

    A number that is not a size (`Real`, `Truth`) counts as 1.
    """
    if isinstance(size, (int, Real, Truth)):
        return size if isinstance(size, int) else 1
    return int(size.subs(dict.fromkeys(size.free_symbols, symbol_value)))


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """Return the sizes of a fake tensor, as integers, or expressions for dynamic sizes."""
    shape = tuple(value.shape)
    for dimension in shape:
        if type(dimension) is not int:
            return tuple(map(size_of, shape))
    return shape


def free_symbols(sizes: Iterable[Size]) -> set[sympy.Symbol]:
    """Return the symbols (dynamic sizes) in some sizes."""
    return {symbol for size in sizes if type(size) is not int and isinstance(size, sympy.Expr) for symbol in _symbols_of(size)}


@lru_cache(1 << 12)
def _symbols_of(expression: sympy.Expr) -> frozenset[sympy.Symbol]:
    """Return the symbols in an expression; sympy looks for them in each call."""
    return frozenset(expression.free_symbols)
