"""Facts about a query-by-key value, as a function of delta = key position - query position.

Masks are index arithmetic: `col <= row`, `row - col < w`, `tril`. Each is piecewise constant in delta, so a mask, a bias,
or a value computed from them is a short list of intervals of delta, with one fact each.
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
    """factor * delta + offset, an integer that its dtype represents exactly."""

    factor: int
    offset: int

    def range_within(self, reach: int) -> Range:
        """Return the range for delta in [-reach, reach]."""
        max_change = abs(self.factor) * reach
        return Range(self.offset - max_change, self.offset + max_change)


Fact: TypeAlias = "Range | Slope"


class DeltaInterval(NamedTuple):
    """low <= delta <= high; None is unbounded."""

    low: int | None
    high: int | None


@dataclass(frozen=True)
class Pieces:
    """A piecewise fact: `facts[i]` holds for bounds[i - 1] <= delta < bounds[i]."""

    bounds: tuple[int, ...]
    facts: tuple[Fact, ...]

    def at(self, delta: int) -> Fact:
        """Return the fact that holds for one delta."""
        return self.facts[bisect_right(self.bounds, delta)]

    def support(self, is_identity: Callable[[Fact], bool]) -> DeltaInterval:
        """Return the smallest interval of delta outside which every fact is an identity."""
        first, last = 0, len(self.facts)
        while first < last and is_identity(self.facts[first]):
            first += 1
        if first == last:
            return DeltaInterval(0, 0)
        while is_identity(self.facts[last - 1]):
            last -= 1
        low = self.bounds[first - 1] if first else None
        high = self.bounds[last - 1] - 1 if last < len(self.facts) else None
        return DeltaInterval(low, high)


def constant_pieces(fact: Fact) -> Pieces:
    """Return `Pieces` with one fact for every delta."""
    return Pieces((), (fact,))


def hull_of(pieces: Pieces, reach: int) -> Range:
    """Return the hull of all facts for delta in [-reach, reach]."""
    return hull(*(fact.range_within(reach) if isinstance(fact, Slope) else fact for fact in pieces.facts))


def merge_equal_pieces(bounds: Sequence[int], facts: Sequence[Fact]) -> Pieces:
    """Return `Pieces` in which neighbors with equal facts are merged."""
    kept_bounds: list[int] = []
    kept_facts = [facts[0]]
    for bound, fact in zip(bounds, facts[1:], strict=True):
        if fact != kept_facts[-1]:
            kept_bounds.append(bound)
            kept_facts.append(fact)
    return Pieces(tuple(kept_bounds), tuple(kept_facts))


def combine_pieces(function: Callable[..., Pieces], *operands: Pieces) -> Pieces:
    """Apply a function of facts to each interval on which all operands have one fact.

    The function returns `Pieces`; its bounds inside the interval are kept.
    """
    operand_bounds = sorted({bound for operand in operands for bound in operand.bounds})
    bounds: list[int] = []
    facts: list[Fact] = []
    for low, high in zip([None, *operand_bounds], [*operand_bounds, None], strict=True):
        sample = low if low is not None else (high - 1 if high is not None else 0)
        piece = function(*(operand.at(sample) for operand in operands))
        inner = [bound for bound in piece.bounds if (low is None or bound > low) and (high is None or bound < high)]
        if low is not None:
            bounds.append(low)
        bounds.extend(inner)
        facts.append(piece.at(low) if low is not None else piece.facts[0])
        facts.extend(piece.at(bound) for bound in inner)
    return merge_equal_pieces(bounds, facts)


def compare_slope(relation: str, slope: Slope, value: float) -> Pieces:
    """Return where `factor * delta + offset <relation> value` holds, as piecewise truth values."""
    if slope.factor == 0 or not math.isfinite(value):
        return constant_pieces(constant(_relation(relation, slope.offset, value)))
    edge = (Fraction(value) - slope.offset) / slope.factor
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
    """Return |factor * delta + offset| as at most two slopes."""
    if slope.factor == 0:
        return constant_pieces(Slope(0, abs(slope.offset)))
    edge = -(slope.offset // slope.factor)  # the first delta >= -offset / factor
    rising = slope if slope.factor > 0 else Slope(-slope.factor, -slope.offset)
    return Pieces((edge,), (Slope(-rising.factor, -rising.offset), rising))
