"""Values are placed in loops by a table of numbers: what a placement depends on is in it, and equal layers are placed once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.ir.facts import StorageClass
from streamfx.passes.partition import loop_distribution
from streamfx.passes.partition.value_table import Access, Bytes, RegionValue

OWN, KEPT = Access(0, True, False, False), Access(0, False, True, True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


FOUND_ONCE = (
    loop_distribution.levels_of,
    loop_distribution.latest_levels,
    loop_distribution.filled,
    loop_distribution.best_placed,
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
    streamfx.explain(Decoder(layers), torch.randint(0, 50, (2, 64)), chunk_size=16).summary(with_baseline=False)
    asked = loop_distribution.levels_of.cache_info()
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


def test_an_earlier_loop_stores_what_is_asked_for() -> None:
    levels = loop_distribution.levels_of(table())
    assert levels == (0, 0, 1)
    placed = loop_distribution.filled(table(), frozenset({2}), levels, Bytes((8, 8, 8), (8, 8, 8)))
    assert [content.stacked for content in placed.loops] == [{1}, {2}], "the first value is made again: it takes nothing to do so"


@pytest.mark.parametrize(
    "changed",
    [table(KEPT), table(form=StorageClass.SUM), table(is_expensive=True), table(OWN._replace(is_stored_before=True))],
    ids=["all rows are asked for", "a sum", "a product", "rows of another loop"],
)
def test_what_is_asked_of_a_value_is_part_of_what_is_known(changed: tuple[RegionValue, ...]) -> None:
    sizes = Bytes((8, 8, 8), (8, 8, 8))
    known = loop_distribution.best_placed(table(), frozenset({2}), frozenset({2}), sizes)
    assert loop_distribution.best_placed(table(), frozenset({2}), frozenset({2}), sizes) is known
    before = loop_distribution.best_placed.cache_info().misses
    loop_distribution.best_placed(changed, frozenset({2}), frozenset({2}), sizes)
    assert loop_distribution.best_placed.cache_info().misses == before + 1, "it is placed by itself"


def test_all_rows_of_an_earlier_value_are_stored() -> None:
    asked = table(Access(0, False, True, True))
    placed = loop_distribution.best_placed(asked, frozenset({2}), frozenset({2}), Bytes((8, 8, 8), (8, 8, 8)))
    assert placed.loops[0].stacked == {0, 1}


def test_sizes_are_part_of_what_is_known() -> None:
    """The same operators on values of other sizes are placed by themselves."""
    made = (
        value(is_expensive=True),
        value(needs=(Access(0, True, False, False),)),
        value(needs=(Access(1, False, True, False),)),
        value(needs=(Access(1, True, False, False), Access(2, False, True, False))),
    )
    stored = {
        size: loop_distribution.best_placed(made, frozenset({3}), frozenset({3}), Bytes((size, 8, 8, 8), (size, 8, 8, 8)))
        for size in (4, 16)
    }
    assert loop_distribution.best_placed.cache_info().misses == len(stored)
