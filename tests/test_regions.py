"""Values are placed in loops by a table of numbers: what a placement depends on is in it, and equal layers are placed once."""

from __future__ import annotations

import pytest

import streamfx
from streamfx.ir.facts import StorageClass
from streamfx.passes.partition import loop_distribution
from streamfx.passes.partition.value_table import Access, Bytes, RegionValue
from tests.support.stages import Layers, batch

pytestmark = pytest.mark.compiled

OWN, KEPT = Access(0, True, False, False), Access(0, False, True, True)
FOUND_ONCE = (
    loop_distribution.earliest_loops,
    loop_distribution.latest_loops,
    loop_distribution.fill_loops,
    loop_distribution.cheapest_placement,
)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Each test begins with nothing known."""
    for function in FOUND_ONCE:
        function.cache_clear()


def solved(layers: int) -> tuple[int, list[int]]:
    """How many regions were asked for in the plan of a decoder, and for how many tables each part of the answer was found."""
    for function in FOUND_ONCE:
        function.cache_clear()
    streamfx.explain(Layers(layers), *batch(length=64), chunk_size=16).summary(with_baseline=False)
    asked = loop_distribution.earliest_loops.cache_info()
    return asked.hits + asked.misses, [function.cache_info().misses for function in FOUND_ONCE]


def test_equal_layers_are_placed_once() -> None:
    few, more = solved(4), solved(8)
    assert more[0] >= few[0] + 8, "each layer has a forward and a backward half"
    assert more[1] == few[1], "more layers of the same kind are no more work"


def value(form: StorageClass = StorageClass.ROWS, needs: tuple[Access, ...] = (), is_expensive: bool = False) -> RegionValue:
    return RegionValue(form, needs, (), (), is_expensive)


def table(need: Access = OWN, form: StorageClass = StorageClass.ROWS, is_expensive: bool = False) -> tuple[RegionValue, ...]:
    """A value, what an operator makes of it, and what waits for all of that and reads the first value, too."""
    last = value(needs=(need, Access(1, False, True, True)))
    return (value(form, is_expensive=is_expensive), value(needs=(Access(0, True, False, False),)), last)


def placed(values: tuple[RegionValue, ...], size: int = 8) -> loop_distribution.RegionPlacement:
    return loop_distribution.cheapest_placement(values, frozenset({2}), frozenset({2}), Bytes((size, 8, 8), (size, 8, 8)))


@pytest.mark.parametrize(
    "changed",
    [table(KEPT), table(form=StorageClass.SUM), table(is_expensive=True), table(OWN._replace(is_stored_before=True))],
    ids=["all rows are asked for", "a sum", "a product", "rows of another loop"],
)
def test_what_is_asked_of_a_value_is_part_of_what_is_known(changed: tuple[RegionValue, ...]) -> None:
    known = placed(table())
    assert placed(table()) is known
    before = loop_distribution.cheapest_placement.cache_info().misses
    placed(changed)
    placed(table(), size=16)
    assert loop_distribution.cheapest_placement.cache_info().misses == before + 2, "each is placed by itself"
