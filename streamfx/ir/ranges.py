"""Between which numbers the elements of a value lie: the one lattice of what is known of values.

A range is a proof about every element: it lies in [low, high], or is NaN where `nan` says that it may be. Bounds are exact Python
numbers; what a type cannot hold has wrapped (integers), rounded or become infinite (floating point) before a range says so.
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
SWAMPS = -9e29  # a score at least this negative leaves exactly nothing beside one that is not; fills are -1e30 or less
SWAMPS_HALF = -3e4  # the same for float16, whose range ends at 65504
SWAMPED_BY = -1e28  # a score at least this large is not left out beside one that swamps
SWAMPED_BY_HALF = -2.9e4
SEEN_HALF = -5e3  # what a mask adds where products of +-10,000 do not lift what is hidden beside it
ACTIVATION = 1e6  # assumed of trained weights and of what a product makes of ordinary numbers (docs/architecture.md)
ACTIVATION_HALF = 1e4
COUNTED = 1e4  # beside a number as large the logarithm of a count keeps twelve digits in float64, in any type those of a score
LARGER = 1e12  # by more than this nothing ordinary is multiplied between two products
TAME = 1e28  # between two products, weights and activations are multiplied up to here
LONGEST = 2**31 - 1  # rows of any dimension whose size is not known before the run
SLACK = 1e-12  # a bound that was computed is this much wider, for its own rounding


@dataclass(frozen=True)
class Range:
    """Every element is a number in [low, high], or NaN if `nan`.

    How large weights and activations are is assumed rather than proven, and so is what is made of these alone: `assumed` says
    by how much such a value was made larger since, by 2 for x * 2; 0 where the range is proven.
    """

    low: Number
    high: Number
    nan: bool = False
    assumed: Number = field(default=0, compare=False)

    def __post_init__(self) -> None:
        assert self.low <= self.high, f"no range: {self.low} .. {self.high}"

    @property
    def constant(self) -> Number | None:
        """The one number that all elements are."""
        return self.low if self.low == self.high and not self.nan else None

    @property
    def magnitude(self) -> Number:
        return max(abs(self.low), abs(self.high))

    @property
    def is_ordinary(self) -> bool:
        """Whether a product of such numbers is taken for an ordinary number."""
        return self.magnitude <= (TAME if self.assumed else ACTIVATION)

    @property
    def is_counted(self) -> bool:
        """Whether beside such a score the logarithm of a count is kept: a small number, or a weight as it is."""
        return self.magnitude <= (ACTIVATION if self.assumed else COUNTED)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high) and not self.nan

    @property
    def is_zero(self) -> bool:
        """Every element is zero; or NaN, if that is possible at all."""
        return self.low == self.high == 0

    @property
    def has_zero(self) -> bool:
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        text = f"{self.low:g}" if self.low == self.high else f"{self.low:g} .. {self.high:g}"
        return text + " or NaN" if self.nan else text


def constant(value: Number) -> Range:
    """The range of one number; NaN is no number, and may be anything that is NaN."""
    return Range(-INFINITY, INFINITY, True) if value != value else Range(value, value)


def everything(dtype: torch.dtype) -> Range:
    """All that a type can hold."""
    if dtype == torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return Range(-INFINITY, INFINITY, True)
    info = torch.iinfo(dtype)
    return Range(info.min, info.max)


def activation(dtype: torch.dtype) -> Range:
    """A computed number like any other, by the assumption on trained weights: finite, and no stand-in for minus infinity."""
    if not dtype.is_floating_point:
        return everything(dtype)
    most = ACTIVATION_HALF if dtype == torch.float16 else min(ACTIVATION, torch.finfo(dtype).max)
    return Range(-most, most, assumed=1)


def hull(*ranges: Range) -> Range:
    """The least range around all."""
    low, high = min(r.low for r in ranges), max(r.high for r in ranges)
    return Range(low, high, any(r.nan for r in ranges), assumed_of(ranges))


def assumed_of(ranges: Sequence[Range], made: Range | None = None) -> Number:
    """By how much a value was made larger than weights and activations are (`Range.assumed`); 0 where it is not assumed at all:
    where none of its operands is, or one of the others is large by itself, or it was made larger by more than `LARGER`.

    A value that is one of its operands takes the most of theirs. One that is computed, with a range `made`, takes their product,
    times what the range is larger than that of a product of the assumed operands; and never more than its range is.
    """
    sources = [r for r in ranges if r.assumed]
    if not sources or any(not r.assumed and not r.magnitude <= ACTIVATION for r in ranges):
        return 0
    if made is None:
        return max(r.assumed for r in sources)
    larger, usual = math.prod(r.assumed for r in sources), math.prod(r.magnitude for r in sources)
    if math.isfinite(made.magnitude) and 0 < usual < INFINITY:
        larger = max(1, min(made.magnitude, larger * max(1, made.magnitude / usual)))
    return larger if larger <= LARGER else 0


def widened(low: Number, high: Number, nan: bool = False) -> Range:
    """A range whose bounds were computed: wider by more than double precision rounds, where they are no integers."""
    if low != low or high != high:
        return Range(-INFINITY, INFINITY, True)
    if isinstance(low, int) and isinstance(high, int):
        return Range(low, high, nan)
    return Range(scaled(low, -SLACK), scaled(high, SLACK), nan)


def scaled(value: Number, share: float) -> Number:
    """A bound that is so much larger, by a share of its size."""
    return value + share * abs(value) if math.isfinite(value) else value


def is_exact_in(dtype: torch.dtype, low: Number, high: Number) -> bool:
    """Whether a type holds every whole number in [low, high] as it is."""
    if dtype.is_complex:
        return False
    if dtype.is_floating_point:
        whole = 2.0 / torch.finfo(dtype).eps  # all whole numbers up to 2 ** (digits of the mantissa)
        return -whole <= low and high <= whole and max(abs(low), abs(high)) <= torch.finfo(dtype).max
    limits = everything(dtype)
    return limits.low <= low and high <= limits.high


def in_type(known: Range, dtype: torch.dtype) -> Range:
    """What a type makes of numbers that are in a range before they are stored: wrapped, rounded, infinite or true."""
    if dtype == torch.bool:
        return Range(0 if known.has_zero else 1, 0 if known.constant == 0 else 1)
    if dtype.is_complex or (dtype.itemsize == 1 and dtype.is_floating_point and not known.magnitude <= torch.finfo(dtype).max):
        return everything(dtype)  # what is too large for float8 becomes NaN, infinite or the largest number
    if not dtype.is_floating_point:
        return _whole(known, dtype)
    return Range(_rounded(known.low, dtype), _rounded(known.high, dtype), known.nan, known.assumed)


def _whole(known: Range, dtype: torch.dtype) -> Range:
    """Fractions are cut towards zero; what does not fit may become any number of the type, and so may NaN."""
    limits = everything(dtype)
    if known.nan or known.low < limits.low or known.high > limits.high:
        return limits
    return Range(math.trunc(known.low), math.trunc(known.high))


def _rounded(value: Number, dtype: torch.dtype) -> float:
    """Rounding is monotone: the bounds' own rounding bounds that of all between."""
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
    with unset_fake_temporarily():
        return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item())
