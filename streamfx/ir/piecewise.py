"""Facts about a query-by-key value, as a function of delta = key position - query position.

Masks are index arithmetic: `col <= row`, `row - col < w`, `tril`. Each is piecewise constant in delta, so a mask, a bias,
or a value computed from them is a short list of intervals of delta (`Pieces`), with one *fact* each: a `Range` that holds the
value, or a `Slope` if the value is a linear function of delta. A causal mask is True for delta < 1, False from 1 on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from streamfx.ir.ranges import Range, constant, hull


@dataclass(frozen=True)
class Slope:
    """The value is factor * delta + offset + (0 .. spread), an integer that its dtype represents exactly."""

    factor: int
    offset: int
    spread: int = 0

    def range_within(self, reach: int) -> Range:
        """Return the range of the values for delta in [-reach, reach]."""
        max_change = abs(self.factor) * reach
        return Range(self.offset - max_change, self.offset + max_change + self.spread)

    def plus(self, other: Slope) -> Slope:
        """Return the slope of the sum of two values."""
        return Slope(self.factor + other.factor, self.offset + other.offset, self.spread + other.spread)

    def times(self, number: int) -> Slope:
        """Return the slope of `number` times the value."""
        return Slope(self.factor * number, (self.offset + (self.spread if number < 0 else 0)) * number, self.spread * abs(number))


Fact: TypeAlias = "Range | Slope"


class DeltaInterval(NamedTuple):
    """The interval low <= delta <= high; None is unbounded."""

    low: int | None
    high: int | None


@dataclass(frozen=True)
class Pieces:
    """A piecewise fact: `facts[i]` holds for bounds[i - 1] <= delta < bounds[i]; there is one more fact than bounds."""

    bounds: tuple[int, ...]
    facts: tuple[Fact, ...]

    def at(self, delta: int) -> Fact:
        """Return the fact that holds for one delta."""
        return self.facts[bisect_right(self.bounds, delta)]

    def support(self, is_identity: Callable[[Fact], bool]) -> DeltaInterval:
        """Return the smallest interval of delta outside which every fact is an identity, for example minus infinity.

        [0, 0] if all facts are identities, because an interval may not be empty.
        """
        start, stop = 0, len(self.facts)  # from the first to the last fact that is not an identity
        while start < stop and is_identity(self.facts[start]):
            start += 1
        if start == stop:
            return DeltaInterval(0, 0)
        while is_identity(self.facts[stop - 1]):
            stop -= 1
        low = self.bounds[start - 1] if start else None
        high = self.bounds[stop - 1] - 1 if stop < len(self.facts) else None
        return DeltaInterval(low, high)


def constant_pieces(fact: Fact) -> Pieces:
    """Return `Pieces` with one fact for every delta."""
    return Pieces((), (fact,))


def hull_of(pieces: Pieces, reach: int) -> Range:
    """Return a range that contains the value for every delta in [-reach, reach]: the hull of all facts."""
    return hull(*(fact.range_within(reach) if isinstance(fact, Slope) else fact for fact in pieces.facts))


def merge_equal_pieces(bounds: Sequence[int], facts: Sequence[Fact]) -> Pieces:
    """Return the `Pieces` of these bounds and facts, with neighbors that have equal facts merged into one."""
    kept_bounds: list[int] = []
    kept_facts = [facts[0]]
    for bound, fact in zip(bounds, facts[1:], strict=True):
        if fact != kept_facts[-1]:
            kept_bounds.append(bound)
            kept_facts.append(fact)
    return Pieces(tuple(kept_bounds), tuple(kept_facts))


def combine_pieces(function: Callable[..., Pieces], *operands: Pieces) -> Pieces:
    """Return the `Pieces` of an elementwise function of some values, from the `Pieces` of the operands.

    The bounds of all operands cut the line of delta into intervals, on each of which every operand has one fact.
    `function(fact, ...)` takes these facts, and returns `Pieces`, because its result may change inside the interval:
    `delta <= 3` of a slope.
    """
    operand_bounds = sorted({bound for operand in operands for bound in operand.bounds})
    first_delta = operand_bounds[0] - 1 if operand_bounds else 0  # any delta of the first interval, which is unbounded below
    first_result = function(*(operand.at(first_delta) for operand in operands))
    bounds = [bound for bound in first_result.bounds if not operand_bounds or bound < operand_bounds[0]]
    facts = [first_result.facts[0], *(first_result.at(bound) for bound in bounds)]
    for low, high in zip(
        operand_bounds, [*operand_bounds[1:], math.inf], strict=False
    ):  # low <= delta < high; none without bounds
        result = function(*(operand.at(low) for operand in operands))
        interval_bounds = [low, *(bound for bound in result.bounds if low < bound < high)]
        bounds.extend(interval_bounds)
        facts.extend(result.at(bound) for bound in interval_bounds)
    return merge_equal_pieces(bounds, facts)


def compare_slope(relation: str, slope: Slope, value: float) -> Pieces:
    """Return for which deltas `factor * delta + offset <relation> value` holds, as piecewise truth values.

    `relation` is named as in ATen: "lt", "le", "gt", "ge", "eq", "ne". Unknown where the spread of the slope decides.
    """
    if slope.spread:
        if relation in ("eq", "ne"):
            return constant_pieces(Range(0, 1))
        ends = (compare_slope(relation, Slope(slope.factor, slope.offset + change), value) for change in (0, slope.spread))
        return combine_pieces(lambda low, high: constant_pieces(hull(low, high)), *ends)
    if slope.factor == 0 or not math.isfinite(value):
        return constant_pieces(constant(_relation(relation, slope.offset, value)))
    edge = (Fraction(value) - slope.offset) / slope.factor  # the delta at which both sides are equal
    if slope.factor < 0:
        relation = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(relation, relation)
    first_at, first_above = math.ceil(edge), math.floor(edge) + 1  # first delta >= edge, first delta > edge
    yes, no = constant(True), constant(False)
    match relation:
        case "lt":
            return Pieces((first_at,), (yes, no))
        case "le":
            return Pieces((first_above,), (yes, no))
        case "gt":
            return Pieces((first_above,), (no, yes))
        case "ge":
            return Pieces((first_at,), (no, yes))
    equal, unequal = (yes, no) if relation == "eq" else (no, yes)
    return constant_pieces(unequal) if first_at == first_above else Pieces((first_at, first_above), (unequal, equal, unequal))


def _relation(relation: str, left: float, right: float) -> bool:
    """Return whether `left <relation> right` holds, for a relation named as in ATen ("lt", "le", ...)."""
    return {
        "lt": left < right,
        "le": left <= right,
        "gt": left > right,
        "ge": left >= right,
        "eq": left == right,
        "ne": left != right,
    }[relation]


def absolute_value(slope: Slope) -> Pieces:
    """Return |factor * delta + offset| as one or two slopes: it falls up to the zero of the slope, then rises."""
    if slope.factor == 0:
        return constant_pieces(Slope(0, abs(slope.offset)))
    edge = -(slope.offset // slope.factor)  # the first delta >= -offset / factor
    rising = slope if slope.factor > 0 else Slope(-slope.factor, -slope.offset)
    return Pieces((edge,), (Slope(-rising.factor, -rising.offset), rising))
