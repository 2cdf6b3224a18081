"""Facts by interval of delta against evaluation at every delta."""

import math
import operator

from hypothesis import given
from hypothesis import strategies as st

from streamfx.ir.piecewise import (
    Fact,
    Pieces,
    Slope,
    absolute_value,
    combine_pieces,
    compare_slope,
    constant_pieces,
    hull_of,
    merge_equal_pieces,
)
from streamfx.ir.ranges import Range, constant

DELTAS = range(-40, 41)
ORDINARY, UNKNOWN = Range(-9, 9), Range(-math.inf, math.inf, True)
RELATIONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne}
slopes = st.builds(
    lambda factor, offset, unit, rest: Slope(factor * unit, offset * unit + rest),
    st.integers(-3, 3),
    st.integers(-9, 9),
    st.sampled_from([1, 1, 2**55]),
    st.sampled_from([0, 0, -3, 3]),
)
facts = st.one_of(st.builds(constant, st.integers(-2, 2)), slopes, st.sampled_from([ORDINARY, UNKNOWN]))


@st.composite
def pieces(draw: st.DrawFn) -> Pieces:
    cuts = sorted(draw(st.sets(st.integers(-12, 12), max_size=4)))
    return merge_equal_pieces(cuts, draw(st.lists(facts, min_size=len(cuts) + 1, max_size=len(cuts) + 1)))


def value(fact: Fact, delta: int) -> float | None:
    return fact.factor * delta + fact.offset if isinstance(fact, Slope) else fact.constant


@given(st.sampled_from(sorted(RELATIONS)), slopes, st.one_of(st.integers(-20, 20), st.floats(allow_nan=False)))
def test_compare_slope(relation: str, slope: Slope, bound: float) -> None:
    found = compare_slope(relation, slope, bound)
    for delta in DELTAS:
        assert found.at(delta) == constant(RELATIONS[relation](slope.factor * delta + slope.offset, bound)), delta


@given(slopes)
def test_absolute(slope: Slope) -> None:
    found = absolute_value(slope)
    for delta in DELTAS:
        assert value(found.at(delta), delta) == abs(slope.factor * delta + slope.offset)


@given(pieces())
def test_joined_has_no_equal_neighbors(one: Pieces) -> None:
    assert all(a != b for a, b in zip(one.facts, one.facts[1:], strict=False))
    assert list(one.bounds) == sorted(set(one.bounds))
    assert len(one.facts) == len(one.bounds) + 1


@given(pieces(), pieces(), st.integers(-10, 10))
def test_combined_applies_a_function_at_every_delta(one: Pieces, other: Pieces, bound: int) -> None:
    """The function itself gives pieces."""

    def positive(a: Fact, b: Fact) -> Pieces:
        known = b if a is UNKNOWN else a
        return compare_slope("gt", known, bound) if isinstance(known, Slope) else constant_pieces(known)

    made = combine_pieces(positive, one, other)
    for delta in DELTAS:
        fact = other.at(delta) if one.at(delta) is UNKNOWN else one.at(delta)
        wanted = constant(fact.factor * delta + fact.offset > bound) if isinstance(fact, Slope) else fact
        assert made.at(delta) == wanted, delta


@given(pieces())
def test_support_holds_all_that_is_no_identity(one: Pieces) -> None:
    def is_zero(fact: Fact) -> bool:
        return isinstance(fact, Range) and fact.is_zero

    low, high = one.support(is_zero)
    for delta in DELTAS:
        if (low is not None and delta < low) or (high is not None and delta > high):
            assert is_zero(one.at(delta))
    everything = [delta for delta in DELTAS if not is_zero(one.at(delta))]
    if everything and low is not None:
        assert low == min(everything)
    if everything and high is not None:
        assert high == max(everything)


def test_ends_are_open() -> None:
    assert constant_pieces(UNKNOWN).support(lambda fact: value(fact, 0) is not None) == (None, None)
    causal = Pieces((1,), (ORDINARY, constant(-math.inf)))
    assert causal.support(lambda fact: fact == constant(-math.inf)) == (None, 0)


@given(pieces())
def test_the_hull_holds_all_facts(one: Pieces) -> None:
    around = hull_of(one, max(DELTAS))
    for delta in DELTAS:
        fact = one.at(delta)
        known = constant(fact.factor * delta + fact.offset) if isinstance(fact, Slope) else fact
        assert around.low <= known.low and known.high <= around.high and known.nan <= around.nan
