"""8, 64 and 256 ranks of which one is there: what it sends, to whom, and that all others send the same in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from streamfx.torch_private.groups import imagined_ranks
from tests.support import cut_by_hand
from tests.support.collectives import data_of
from tests.support.many_ranks import KINDS, NEAR, listing
from tests.support.over_ranks import facts_of
from tests.support.spread import only

WORLDS = (8, 64, 256)
ROWS = 8


@pytest.fixture(autouse=True)
def groups_are_forgotten() -> Iterator[None]:
    yield
    cut_by_hand.cut_over.clear()


def listing_of(kind: str, world: int, rank: int) -> str:
    with imagined_ranks(world, rank):
        return listing(facts_of(KINDS[kind](world), data_of(rank, ROWS), lambda text, *_, **__: [text]))


CASES = [(kind, world) for kind in KINDS for world in WORLDS]


@pytest.mark.parametrize(("kind", "world"), only([(kind, 64) for kind in KINDS], CASES))
def test_both_halves_of_many_ranks(kind: str, world: int, golden: Callable[[str], None]) -> None:
    golden(listing_of(kind, world, 0))


@pytest.mark.parametrize(("kind", "world"), only([("tensor", 64), ("Ulysses", 256)], CASES))
def test_all_ranks_send_the_same_in_the_same_order(kind: str, world: int) -> None:
    first, second, last = (listing_of(kind, world, rank) for rank in (0, 1, world - 1))
    assert first == second == last
    assert f"{NEAR if kind != 'gathers' else world} ranks, 1 apart" in first
