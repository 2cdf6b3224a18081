"""Ranges: the bounds of the elements of a value, the only lattice of facts about values.

A range is a proof about every element: it lies in [low, high], or is NaN if `nan` is set. Bounds are exact Python
numbers. A number that a dtype cannot represent has wrapped (integers), or rounded or become infinite (floating point),
before a range describes it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch

from streamfx.torch_private import unset_fake_temporarily

Number: TypeAlias = "int | float"

INFINITY = math.inf
HIDDEN_SCORE = -9e29  # a score up to this has weight 0 exactly if another score is ordinary; mask fills are -1e30 or less
HIDDEN_SCORE_HALF = -3e4  # the same for float16, whose range ends at 65504
VISIBLE_SCORE = -1e28  # if another score of the row is at least this, hidden scores have weight 0
VISIBLE_SCORE_HALF = -2.9e4
MIN_VISIBLE_MASK_HALF = -5e3  # least float16 mask value of visible keys: products of +-10,000 do not raise hidden scores above it
ACTIVATION = 1e6  # assumed bound of trained weights, and of products of ordinary numbers (docs/internals.md)
ACTIVATION_HALF = 1e4
MAX_NEXT_TO_COUNT = (
    1e4  # added to a number up to this, the log of a count keeps twelve digits in float64, and in other dtypes as many as a score
)
MAX_GROWTH = 1e12  # between two products, ordinary values are assumed to grow by at most this factor
MAX_ORDINARY = 1e28  # bound of weights and activations that have grown between two products
MAX_ROWS = 2**31 - 1  # rows of a dimension whose size is unknown before the run
SLACK = 1e-12  # relative widening of computed bounds, for their own rounding


@dataclass(frozen=True)
class Range:
    """Every element is a number in [low, high], or NaN if `nan`.

    The magnitude of weights and activations, and of values computed from them alone, is assumed rather than proven.
    `assumed` is the factor by which such a value has grown since that assumption: 2 for x * 2. It is 0 if the range is
    proven.
    """

    low: Number
    high: Number
    nan: bool = False
    assumed: Number = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Check that the bounds are in order."""
        assert self.low <= self.high, f"no range: {self.low} .. {self.high}"

    @property
    def constant(self) -> Number | None:
        """The number that all elements equal; None if elements may differ, or may be NaN."""
        return self.low if self.low == self.high and not self.nan else None

    @property
    def magnitude(self) -> Number:
        """The largest absolute value of an element, as far as the range says."""
        return max(abs(self.low), abs(self.high))

    @property
    def is_ordinary(self) -> bool:
        """Whether a product (matmul) of such numbers is assumed to hold ordinary numbers again, as `activation` defines them."""
        return self.magnitude <= (MAX_ORDINARY if self.assumed else ACTIVATION)

    @property
    def is_counted(self) -> bool:
        """Whether score + log(count of keys) keeps enough digits of the log: the score is small, or an assumed weight."""
        return self.magnitude <= (ACTIVATION if self.assumed else MAX_NEXT_TO_COUNT)

    @property
    def is_finite(self) -> bool:
        """Whether no element is infinite or NaN."""
        return math.isfinite(self.low) and math.isfinite(self.high) and not self.nan

    @property
    def is_zero(self) -> bool:
        """Whether every element is zero, or NaN if `nan`."""
        return self.low == self.high == 0

    @property
    def has_zero(self) -> bool:
        """Whether zero lies between the bounds."""
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        text = f"{self.low:g}" if self.low == self.high else f"{self.low:g} .. {self.high:g}"
        return text + " or NaN" if self.nan else text


def constant(value: Number) -> Range:
    """Return the range of one number. NaN has no bounds: its range is unbounded."""
    return Range(-INFINITY, INFINITY, True) if value != value else Range(value, value)


def full_range(dtype: torch.dtype) -> Range:
    """Return the range of all values of a dtype."""
    if dtype == torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return Range(-INFINITY, INFINITY, True)
    info = torch.iinfo(dtype)
    return Range(info.min, info.max)


def activation(dtype: torch.dtype) -> Range:
    """Return the range of an ordinary computed value, by the assumption on trained weights.

    It is finite, and not large enough to act as minus infinity.
    """
    if not dtype.is_floating_point:
        return full_range(dtype)
    limit = ACTIVATION_HALF if dtype == torch.float16 else min(ACTIVATION, torch.finfo(dtype).max)
    return Range(-limit, limit, assumed=1)


def hull(*ranges: Range) -> Range:
    """Return the smallest range that contains all ranges: the range of a concatenation, a maximum, a selection."""
    low, high = min(r.low for r in ranges), max(r.high for r in ranges)
    return Range(low, high, any(r.nan for r in ranges), assumed_growth(ranges))


def assumed_growth(ranges: Sequence[Range], computed: Range | None = None) -> Number:
    """Return `Range.assumed` of a result: its growth relative to weights and activations, or 0 if nothing is assumed.

    `ranges` are those of the operands. Nothing is assumed if no operand is assumed, if a proven operand is large, or if the
    growth exceeds `MAX_GROWTH`. Without `computed`, the result selects from its operands and takes the largest growth of
    them. Otherwise `computed` is the range of the result: it takes the product of their growths, times the ratio of its
    magnitude to the product of the assumed operands' magnitudes (2 for x * y * 2); at most its magnitude.
    """
    assumed_operands = [operand for operand in ranges if operand.assumed]
    if not assumed_operands or any(not operand.assumed and not operand.magnitude <= ACTIVATION for operand in ranges):
        return 0
    if computed is None:
        return max(operand.assumed for operand in assumed_operands)
    growth = math.prod(operand.assumed for operand in assumed_operands)
    product_magnitude = math.prod(operand.magnitude for operand in assumed_operands)
    if math.isfinite(computed.magnitude) and 0 < product_magnitude < INFINITY:
        growth = max(1, min(computed.magnitude, growth * max(1, computed.magnitude / product_magnitude)))
    return growth if growth <= MAX_GROWTH else 0


def widen_range(low: Number, high: Number, nan: bool = False) -> Range:
    """Return a range with computed bounds; unless both are integers, widen them by more than the rounding of float64.

    If a bound is NaN, the range is unbounded.
    """
    if low != low or high != high:
        return Range(-INFINITY, INFINITY, True)
    if isinstance(low, int) and isinstance(high, int):
        return Range(low, high, nan)
    return Range(scaled(low, -SLACK), scaled(high, SLACK), nan)


def scaled(value: Number, share: float) -> Number:
    """Move a bound by a share of its magnitude, up if the share is positive; an infinite bound stays."""
    return value + share * abs(value) if math.isfinite(value) else value


def is_exact_in(dtype: torch.dtype, low: Number, high: Number) -> bool:
    """Return whether a dtype represents every integer in [low, high] exactly; False for complex dtypes."""
    if dtype.is_complex:
        return False
    if dtype.is_floating_point:
        exact_limit = 2.0 / torch.finfo(dtype).eps  # all integers up to 2 ** (digits of the mantissa)
        return -exact_limit <= low and high <= exact_limit and max(abs(low), abs(high)) <= torch.finfo(dtype).max
    limits = full_range(dtype)
    return limits.low <= low and high <= limits.high


def cast_range(bounds: Range, dtype: torch.dtype) -> Range:
    """Return the range after a cast to a dtype, which may wrap, round, overflow to infinity, or convert to bool."""
    if dtype == torch.bool:
        return Range(0 if bounds.has_zero else 1, 0 if bounds.constant == 0 else 1)
    if dtype.is_complex or (dtype.itemsize == 1 and dtype.is_floating_point and not bounds.magnitude <= torch.finfo(dtype).max):
        return full_range(dtype)  # float8 overflow gives NaN, infinity, or the largest number
    if not dtype.is_floating_point:
        return _truncated(bounds, dtype)
    return Range(_rounded(bounds.low, dtype), _rounded(bounds.high, dtype), bounds.nan, bounds.assumed)


def _truncated(bounds: Range, dtype: torch.dtype) -> Range:
    """Return the range after a cast to an integer dtype, which truncates.

    If NaN, or a value beyond the dtype's limits, is possible, the result may be any integer.
    """
    limits = full_range(dtype)
    if bounds.nan or bounds.low < limits.low or bounds.high > limits.high:
        return limits
    return Range(math.trunc(bounds.low), math.trunc(bounds.high))


def _rounded(value: Number, dtype: torch.dtype) -> float:
    """Round a bound to a floating-point dtype. Rounding is monotone, so rounded bounds contain all rounded values."""
    try:
        double = float(value)
    except OverflowError:
        double = math.copysign(INFINITY, value)
    if dtype == torch.float64 or double == 0 or math.isinf(double):
        return double
    if dtype == torch.float32:
        return ctypes.c_float(double).value
    return _rounded_by_torch(double, dtype)


@lru_cache(maxsize=4096)
def _rounded_by_torch(value: float, dtype: torch.dtype) -> float:
    """Round a number as a cast to the dtype does on the CPU."""
    with unset_fake_temporarily():
        return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item())
