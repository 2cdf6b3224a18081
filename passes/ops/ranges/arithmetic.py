"""Transfer functions of sums, products, quotients, comparisons, logic and selections.

A `Range` bounds every element of a value: it lies in [low, high], or may be NaN if `nan` is set. A transfer function gets the
ranges of an operator's arguments, under their ATen names, and returns the range of the result. A condition has the range
[0, 0] (never true), [1, 1] (always) or [0, 1].
"""

from __future__ import annotations

import math
from typing import Any

import torch

from streamfx.ir.joint import is_tensor
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.ranges import INFINITY, Number, Range, cast_range, constant, full_range, hull, widen_range
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.patterns import is_largest_of, is_share_of, normalized_count
from streamfx.passes.ops.ranges.transfer import RangeCall, elementwise

aten = torch.ops.aten
ONE = constant(1)
ANYTHING = Range(-INFINITY, INFINITY, nan=True)


# -- interval arithmetic


def plus(a: Range, b: Range) -> Range:
    """Return the range of x + y for x in `a`, y in `b`: [a.low + b.low, a.high + b.high].

    Infinities of opposite signs add up to NaN. If one operand is always the same infinity, so is the sum.
    """
    nan = a.nan or b.nan or _are_opposite(a, b) or _are_opposite(b, a)
    for operand in (a, b):
        if operand.low == operand.high and math.isinf(operand.low):
            return Range(operand.low, operand.low, nan)
    low = -INFINITY if -INFINITY in (a.low, b.low) else a.low + b.low
    high = INFINITY if INFINITY in (a.high, b.high) else a.high + b.high
    return widen_range(low, high, nan)


def _are_opposite(a: Range, b: Range) -> bool:
    """Return whether `a` may contain plus infinity and `b` minus infinity, whose sum is NaN."""
    return a.high == INFINITY and b.low == -INFINITY


def negated(a: Range) -> Range:
    """Return the range of -x for x in `a`."""
    return Range(-a.high, -a.low, a.nan)


def minus(a: Range, b: Range) -> Range:
    """Return the range of x - y for x in `a`, y in `b`."""
    return plus(a, negated(b))


def times(a: Range, b: Range) -> Range:
    """Return the range of x * y for x in `a`, y in `b`: between products of bounds. Zero times infinity is NaN."""
    nan = a.nan or b.nan or (a.has_zero and math.isinf(b.magnitude)) or (b.has_zero and math.isinf(a.magnitude))
    corners = [0 if 0 in (x, y) else x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return widen_range(min(corners), max(corners), nan)


def over(a: Range, b: Range) -> Range:
    """Return the range of the true quotient x / y for x in `a`, y in `b`.

    Division by zero gives an infinity of either sign; 0 / 0 and inf / inf are NaN.
    """
    if b.has_zero:
        return Range(0, 0, nan=True) if a.is_zero else ANYTHING
    nan = a.nan or b.nan or (math.isinf(a.magnitude) and math.isinf(b.magnitude))
    corners = [_quotient(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return widen_range(min(corners), max(corners), nan)


def _quotient(x: Number, y: Number) -> float:
    """Divide the bound x by the nonzero bound y.

    An infinite y gives zero, or an infinity if x is infinite, too. An integer x too large for a float counts as infinite.
    """
    if math.isinf(y):
        return 0.0 if not math.isinf(x) else math.copysign(INFINITY, x) * math.copysign(1, y)
    return float(x) / float(y) if not (isinstance(x, int) and abs(x) > 2**1000) else math.copysign(INFINITY, x)


@elementwise(*of_kind(Kind.ADD))
def _add(call: RangeCall, self: Range, other: Range, alpha: Range = ONE) -> Range:
    return _plus_scaled(self, other, alpha, call.dtype)


@elementwise(*of_kind(Kind.SUBTRACT))
def _sub(call: RangeCall, self: Range, other: Range, alpha: Range = ONE) -> Range:
    """Return the range of `self - alpha * other`. If `other` is provably the maximum of `self`, it is at most zero."""
    difference = _plus_scaled(self, negated(other), alpha, call.dtype)
    if alpha == ONE and is_largest_of(call.arguments["other"], call.arguments["self"]):
        return Range(min(difference.low, 0), min(difference.high, 0), difference.nan)
    return difference


@elementwise(*of_kind(Kind.SUBTRACT_FROM))
def _rsub(call: RangeCall, self: Range, other: Range, alpha: Range = ONE) -> Range:
    return _plus_scaled(other, negated(self), alpha, call.dtype)


def _plus_scaled(a: Range, b: Range, alpha: Range, dtype: torch.dtype) -> Range:
    """Return the range of `a + alpha * b`, computed in `dtype`. Some devices round the product before the addition."""
    if alpha == ONE:
        return plus(a, b)
    scaled = times(b, alpha)
    return hull(plus(a, scaled), plus(a, cast_range(scaled, dtype)))


@elementwise(*of_kind(Kind.MULTIPLY))
def _mul(call: RangeCall, self: Range, other: Range) -> Range:
    """Return the range of `self * other`; an RMS norm, x * rsqrt(mean(x^2) + eps), is at most the root of its size."""
    product, x, y = times(self, other), call.arguments["self"], call.arguments["other"]
    for count, scale in ((normalized_count(x, y), other), (normalized_count(y, x), self)):
        if count is not None and call.dtype.is_floating_point:  # a square below the least normal number may be rounded to zero
            bound = 1.02 * math.sqrt(count) + math.sqrt(count * torch.finfo(call.dtype).tiny) * scale.high
            return Range(max(product.low, -bound), min(product.high, bound), nan=True)
    return product


@elementwise(*of_kind(Kind.DIVIDE))
def _div(call: RangeCall, self: Range, other: Range) -> Range:
    """Return the range of `self / other`.

    If `other` is provably the sum of `self`, which is nonnegative, the quotient is at most one, up to rounding; 0 / 0 is NaN.
    """
    quotient = over(self, other)
    if (
        self.low >= 0
        and _is_floating_point(call.arguments["self"])
        and is_share_of(call.arguments["self"], call.arguments["other"])
    ):
        return Range(0, min(quotient.high, 1.01), nan=True)
    return quotient


def _is_floating_point(item: Any) -> bool:
    """Return whether an argument is a floating-point tensor; sums of other tensors may wrap."""
    return is_tensor(item) and bool(item.meta[VALUE].is_floating_point())


@elementwise(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(self: Range, other: Range, rounding_mode: Any) -> Range:
    """Return the range of a quotient that is rounded ("floor", "trunc", or not: None): rounded outward to integers."""
    quotient = over(self, other)
    if rounding_mode is None:
        return quotient
    if any(math.isinf(item.magnitude) for item in (self, other, quotient)):
        return ANYTHING  # by a remainder, infinity rounds to NaN, and -1 / inf to -1
    return Range(math.floor(quotient.low), math.ceil(quotient.high), quotient.nan)


@elementwise(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(self: Range, other: Range) -> Range:
    return _div_mode(self, other, "floor")


@elementwise(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(call: RangeCall, self: Range, other: Range) -> Range:
    """Return the range of `self % other` for positive divisors: from 0 to below the divisor, or up to it after rounding.

    For other divisors, infinities and NaN, nothing is known (the full range of the dtype).
    """
    if not other.low > 0 or math.isinf(self.magnitude) or self.nan or other.nan:
        return full_range(call.dtype)
    is_integer = not call.dtype.is_floating_point
    if not is_integer and _quotient(self.magnitude, other.low) > torch.finfo(call.dtype).max / 4:
        return full_range(call.dtype)
    return Range(0, other.high - 1 if is_integer else other.high)


@elementwise(aten.neg.default)
def _neg(self: Range) -> Range:
    return negated(self)


@elementwise(aten.abs.default)
def _abs(self: Range) -> Range:
    return Range(0 if self.has_zero else min(abs(self.low), abs(self.high)), self.magnitude, self.nan)


@elementwise(aten._to_copy.default, aten.conj_physical.default)
def _copy(self: Range, dtype: Any = None) -> Range:
    return self


# -- maximum and minimum: NaN propagates


@elementwise(aten.maximum.default)
def _maximum(self: Range, other: Range) -> Range:
    return Range(max(self.low, other.low), max(self.high, other.high), self.nan or other.nan)


@elementwise(aten.minimum.default)
def _minimum(self: Range, other: Range) -> Range:
    return Range(min(self.low, other.low), min(self.high, other.high), self.nan or other.nan)


@elementwise(aten.clamp.default, aten.clamp.Tensor)
def _clamp(self: Range, min: Range | None = None, max: Range | None = None) -> Range:
    clamped = self if min is None else _maximum(self, min)
    return clamped if max is None else _minimum(clamped, max)


@elementwise(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(self: Range, min: Range) -> Range:
    return _maximum(self, min)


@elementwise(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(self: Range, max: Range) -> Range:
    return _minimum(self, max)


# -- comparisons: false if an operand is NaN, except for `ne`


def truth(is_always: bool, is_never: bool) -> Range:
    """Return the range of a condition: [1, 1] if always true, [0, 0] if never, [0, 1] if neither is proven."""
    if is_always:
        return Range(1, 1)
    return Range(0, 0) if is_never else Range(0, 1)


@elementwise(aten.lt.Tensor, aten.lt.Scalar)
def _lt(self: Range, other: Range) -> Range:
    return truth(self.high < other.low and not (self.nan or other.nan), self.low >= other.high)


@elementwise(aten.le.Tensor, aten.le.Scalar)
def _le(self: Range, other: Range) -> Range:
    return truth(self.high <= other.low and not (self.nan or other.nan), self.low > other.high)


@elementwise(aten.gt.Tensor, aten.gt.Scalar)
def _gt(self: Range, other: Range) -> Range:
    return _lt(other, self)


@elementwise(aten.ge.Tensor, aten.ge.Scalar)
def _ge(self: Range, other: Range) -> Range:
    return _le(other, self)


@elementwise(aten.eq.Tensor, aten.eq.Scalar)
def _eq(self: Range, other: Range) -> Range:
    disjoint = self.high < other.low or other.high < self.low
    return truth(self.constant is not None and self.constant == other.constant, disjoint)


@elementwise(aten.ne.Tensor, aten.ne.Scalar)
def _ne(self: Range, other: Range) -> Range:
    equal = _eq(self, other)
    return Range(1 - equal.high, 1 - equal.low)


@elementwise(aten.isnan.default)
def _isnan(self: Range) -> Range:
    return truth(is_always=False, is_never=not self.nan)


@elementwise(aten.isinf.default)
def _isinf(self: Range) -> Range:
    return truth(is_always=False, is_never=not math.isinf(self.magnitude))


# -- logic: on booleans; bitwise on integers


def _as_boolean(operand: Range) -> Range:
    """Return the range of `x != 0`, as a condition, for x in `operand`; NaN is true."""
    return truth(not operand.has_zero, operand.constant == 0)


@elementwise(aten.logical_and.default)
def _logical_and(self: Range, other: Range) -> Range:
    return _minimum(_as_boolean(self), _as_boolean(other))


@elementwise(aten.logical_or.default)
def _logical_or(self: Range, other: Range) -> Range:
    return _maximum(_as_boolean(self), _as_boolean(other))


@elementwise(aten.logical_xor.default)
def _logical_xor(self: Range, other: Range) -> Range:
    return _ne(_as_boolean(self), _as_boolean(other))


@elementwise(aten.logical_not.default)
def _logical_not(self: Range) -> Range:
    true = _as_boolean(self)
    return Range(1 - true.high, 1 - true.low)


@elementwise(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)
def _bitwise_and(call: RangeCall, self: Range, other: Range) -> Range:
    """Return the range of `self & other`: for booleans, of the conjunction; for integers, at most each nonnegative operand."""
    if call.dtype == torch.bool:
        return _logical_and(self, other)
    bounds = [operand.high for operand in (self, other) if operand.low >= 0]
    return Range(0, min(bounds)) if bounds else full_range(call.dtype)


@elementwise(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
def _bitwise_or(call: RangeCall, self: Range, other: Range) -> Range:
    """Return the range of `self | other`: for booleans, of the disjunction; for nonnegative integers, below a power of two."""
    if call.dtype == torch.bool:
        return _logical_or(self, other)
    if self.low < 0 or other.low < 0:
        return full_range(call.dtype)
    return Range(max(self.low, other.low), 2 ** int(max(self.high, other.high)).bit_length() - 1)


@elementwise(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)
def _bitwise_xor(call: RangeCall, self: Range, other: Range) -> Range:
    return _logical_xor(self, other) if call.dtype == torch.bool else full_range(call.dtype)


@elementwise(aten.bitwise_not.default)
def _bitwise_not(call: RangeCall, self: Range) -> Range:
    """Return the range of `~self`: for booleans, of the negation; for signed integers x, of -1 - x; for unsigned, max - x."""
    if call.dtype == torch.bool:
        return _logical_not(self)
    limits = full_range(call.dtype)
    return Range(-1 - self.high, -1 - self.low) if limits.low < 0 else Range(limits.high - self.high, limits.high - self.low)


# -- selections


@elementwise(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(condition: Range, self: Range, other: Range) -> Range:
    true = _as_boolean(condition)
    if true.constant == 1:
        return self
    return other if true.constant == 0 else hull(self, other)


@elementwise(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(self: Range, mask: Range, value: Range) -> Range:
    return _where(mask, value, self)
