"""Transfer functions of unary operators: where they are monotonic, how they are bounded, where they are NaN.

A `Range` bounds every element of a value: it lies in [low, high], or may be NaN if `nan` is set. A transfer function gets the
ranges of an operator's arguments, under their ATen names, and returns the range of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from streamfx.ir.ranges import INFINITY, Number, Range, cast_range, constant, full_range, hull, scaled
from streamfx.passes.ops.ranges.arithmetic import ANYTHING, ONE, minus, negated, over, times
from streamfx.passes.ops.ranges.transfer import RangeCall, elementwise

aten = torch.ops.aten
MIN_POSITIVE = 5e-324  # the least positive double
FUNCTION_ERROR = 1e-3  # devices compute functions to fewer digits than sums: bounds are widened by this factor


def _increasing(function: Callable[[float], float], low: Number = -INFINITY, high: Number = INFINITY) -> Callable[..., Range]:
    """Return the transfer function of an operator that is increasing on its domain [low, high] and NaN elsewhere.

    `function` computes it for one number.
    """

    def transfer(self: Range) -> Range:
        """Return the range from the function's value at the operand's low bound to that at the high bound.

        Bounds are clamped to the domain; NaN if the operand may lie outside.
        """
        overlaps = self.low <= high and self.high >= low
        if not overlaps:
            return ANYTHING
        outside = self.low < low or self.high > high
        return _rounded_range(
            _call_or_infinity(function, max(self.low, low)),
            _call_or_infinity(function, min(self.high, high)),
            self.nan or outside,
        )

    return transfer


def _rounded_range(low: Number, high: Number, nan: bool = False) -> Range:
    """Return [low, high], widened by the relative error of devices (`FUNCTION_ERROR`); any number if a bound is NaN."""
    if low != low or high != high:
        return ANYTHING
    return Range(scaled(low, -FUNCTION_ERROR), scaled(high, FUNCTION_ERROR), nan)


def _call_or_infinity(function: Callable[[float], float], x: Number) -> float:
    """Return `function(x)` for the bound x of a range; infinity if it overflows."""
    try:
        return function(float(x))
    except OverflowError:
        return INFINITY


def _log(x: float) -> float:
    return -INFINITY if x == 0 else math.log(x)


def _log1p(x: float) -> float:
    return -INFINITY if x == -1 else math.log1p(x)


def _exp(x: float) -> float:
    """Return exp(x), but not zero if a device may return a subnormal number."""
    return 0.0 if x < -800 else max(math.exp(x), MIN_POSITIVE)


def _sigmoid(x: float) -> float:
    share = _exp(-abs(x))
    return 1 / (1 + share) if x > 0 else share / (1 + share)


def _softplus(x: float) -> float:
    return x if x > 30 else math.log1p(_exp(x))


def _sinh(x: float) -> float:
    return math.copysign(_call_or_infinity(math.sinh, abs(x)), x)


_sqrt = _increasing(math.sqrt, 0)
elementwise(aten.exp.default, exact=False)(_increasing(_exp))
elementwise(aten.exp2.default, exact=False)(_increasing(lambda x: 0.0 if x < -1150 else max(2.0**x, MIN_POSITIVE)))
elementwise(aten.expm1.default, exact=False)(_increasing(math.expm1))
elementwise(aten.log.default, exact=False)(_increasing(_log, 0))
elementwise(aten.log2.default, exact=False)(_increasing(lambda x: _log(x) / math.log(2), 0))
elementwise(aten.log10.default, exact=False)(_increasing(lambda x: _log(x) / math.log(10), 0))
elementwise(aten.log1p.default, exact=False)(_increasing(_log1p, -1))
elementwise(aten.sqrt.default, exact=False)(_sqrt)
elementwise(aten.tanh.default, exact=False)(_increasing(math.tanh))
elementwise(aten.sigmoid.default, exact=False)(_increasing(_sigmoid))
elementwise(aten.atan.default, exact=False)(_increasing(math.atan))
elementwise(aten.asinh.default, exact=False)(_increasing(math.asinh))
elementwise(aten.sinh.default, exact=False)(_increasing(_sinh))


@elementwise(aten.erf.default, exact=False)
def _erf(self: Range) -> Range:
    """Return the range of erf, also widened by 1e-6: the relative error of approximations may be large near zero."""
    value_range = _increasing(math.erf)(self)
    return Range(value_range.low - 1e-6, value_range.high + 1e-6, value_range.nan)


def _rounding(function: Callable[[Any], Number]) -> Callable[..., Range]:
    """Return the transfer function of an operator that rounds to integers: bounds are rounded, infinities stay."""

    def transfer(self: Range) -> Range:
        low, high = (x if math.isinf(x) else function(x) for x in (self.low, self.high))
        return Range(low, high, self.nan)

    return transfer


elementwise(aten.floor.default)(_rounding(math.floor))
elementwise(aten.ceil.default)(_rounding(math.ceil))
elementwise(aten.trunc.default)(_rounding(math.trunc))
elementwise(aten.round.default)(_rounding(round))


@elementwise(aten.relu.default)
def _relu(self: Range) -> Range:
    return Range(max(self.low, 0), max(self.high, 0), self.nan)


@elementwise(aten.hardtanh.default)
def _hardtanh(self: Range, min_val: Range, max_val: Range) -> Range:
    return Range(min(max(self.low, min_val.low), max_val.high), max(min(self.high, max_val.high), min_val.low), self.nan)


@elementwise(aten.softplus.default, exact=False)
def _softplus_of(self: Range, beta: Range, threshold: Range) -> Range:
    return _softplus_range(self) if beta == ONE and threshold.constant == 20 else ANYTHING


def _softplus_range(operand: Range) -> Range:
    """Return the range of softplus with beta 1, log(1 + exp(x)), for x in `operand`."""
    return _rounded_range(_call_or_infinity(_softplus, operand.low), _call_or_infinity(_softplus, operand.high), operand.nan)


@elementwise(aten.log_sigmoid_forward.default, exact=False)
def _log_sigmoid(self: Range) -> Range:
    return negated(_softplus_range(negated(self)))


@elementwise(aten.sin.default, aten.cos.default, exact=False)
def _wave(self: Range) -> Range:
    return Range(-1.001, 1.001, self.nan or math.isinf(self.magnitude))


@elementwise(aten.silu.default, aten.gelu.default, aten.mish.default, exact=False)
def _gated(self: Range, approximate: Any = None) -> Range:
    """Return the range of silu, gelu and mish, x times a factor in [0, 1] that depends on x: at least -0.31, at most x."""
    nan = self.nan or math.isinf(self.magnitude)
    return Range(-0.31 if self.low < 0 else 0, max(self.high, 0) * 1.001, nan)


@elementwise(aten.leaky_relu.default)
def _leaky_relu(self: Range, negative_slope: Range) -> Range:
    return hull(self, times(self, negative_slope))


@elementwise(aten.elu.default, exact=False)
def _elu(self: Range, alpha: Range, scale: Range, input_scale: Range) -> Range:
    if alpha != ONE or scale != ONE or input_scale != ONE:
        return ANYTHING
    return _rounded_range(max(self.low, -1) if self.low < 0 else self.low, max(self.high, 0), self.nan)


@elementwise(aten.reciprocal.default, exact=False)
def _reciprocal(self: Range) -> Range:
    return over(ONE, self)


@elementwise(aten.rsqrt.default, exact=False)
def _rsqrt(self: Range) -> Range:
    """Return the range of 1 / sqrt(x) for x in `self`; unbounded, or NaN, if x may be zero or negative."""
    if self.low < 0 or self.has_zero:
        return Range(-INFINITY, INFINITY, nan=True)
    high = 1 / math.sqrt(self.low)
    return _rounded_range(0 if math.isinf(self.high) else 1 / math.sqrt(self.high), high, self.nan)


@elementwise(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, exact=False)
def _pow(self: Range, exponent: Range) -> Range:
    """Return the range of `self ** exponent`: for positive bases, between the powers of all bounds.

    For other bases, only if the exponent is an integer from 1 to 16, or 0.5; otherwise, any number.
    """
    power = exponent.constant
    if power == 0.5 and self.low >= 0:
        return _sqrt(self)
    if self.low > 0:
        corners = [_power_or_infinity(x, y) for x in (self.low, self.high) for y in (exponent.low, exponent.high)]
        return _rounded_range(min(corners), max(corners), self.nan or exponent.nan) if all(c == c for c in corners) else ANYTHING
    if power is None or not 0 < power <= 16 or power != int(power):
        return ANYTHING
    ends = [_integer_power(x, int(power)) for x in (self.low, self.high)]
    low = 0 if self.has_zero and power % 2 == 0 else min(ends)
    return (
        Range(low, max(ends), self.nan) if all(isinstance(end, int) for end in ends) else _rounded_range(low, max(ends), self.nan)
    )


def _power_or_infinity(x: Number, y: Number) -> float:
    """Return x ** y for bounds of ranges; infinity on overflow and for zero to a negative power."""
    try:
        return float(x) ** float(y)
    except OverflowError:
        return INFINITY
    except ZeroDivisionError:
        return INFINITY


def _integer_power(x: Number, power: int) -> Number:
    """Return x ** power exactly for integers; a signed infinity on overflow."""
    try:
        return x**power
    except OverflowError:
        return math.copysign(INFINITY, x) if power % 2 else INFINITY


# -- gradients: proportional to the incoming gradient, so zero stays zero


@elementwise(aten.tanh_backward.default, exact=False)
def _tanh_backward(call: RangeCall, grad_output: Range, output: Range) -> Range:
    return times(grad_output, minus(ONE, _maybe_rounded(times(output, output), call.dtype)))


def _maybe_rounded(value_range: Range, dtype: torch.dtype) -> Range:
    """Return the range of an intermediate result, which some devices round to `dtype`, the result's, and others do not."""
    return hull(value_range, cast_range(value_range, dtype))


@elementwise(aten.sigmoid_backward.default, exact=False)
def _sigmoid_backward(call: RangeCall, grad_output: Range, output: Range) -> Range:
    return times(_maybe_rounded(times(grad_output, minus(ONE, output)), call.dtype), output)


@elementwise(aten.threshold_backward.default)
def _threshold_backward(grad_output: Range, self: Range, threshold: Range) -> Range:
    return hull(grad_output, constant(0))


@elementwise(aten.native_dropout_backward.default)
def _native_dropout_backward(grad_output: Range, mask: Range, scale: Range) -> Range:
    return times(times(grad_output, mask), scale)


def _zero_if_zero(call: RangeCall) -> Range:
    """Return zero or NaN if the incoming gradient is zero; otherwise, nothing is known."""
    return Range(0, 0, nan=True) if call.range("grad_output").is_zero else full_range(call.dtype)


@elementwise(aten.silu_backward.default)
def _silu_backward(call: RangeCall, grad_output: Range, self: Range) -> Range:
    return _zero_if_zero(call)


@elementwise(aten.gelu_backward.default)
def _gelu_backward(call: RangeCall, grad_output: Range, self: Range, approximate: Any) -> Range:
    return _zero_if_zero(call)


@elementwise(aten.softplus_backward.default)
def _softplus_backward(call: RangeCall, grad_output: Range, self: Range, beta: Range, threshold: Range) -> Range:
    return _zero_if_zero(call)


@elementwise(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(call: RangeCall, grad_output: Range, self: Range, buffer: Range) -> Range:
    return _zero_if_zero(call)


@elementwise(aten.hardtanh_backward.default)
def _hardtanh_backward(call: RangeCall, grad_output: Range, self: Range, min_val: Range, max_val: Range) -> Range:
    return hull(grad_output, constant(0))
