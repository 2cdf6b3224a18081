"""Texts that ranks exchange: texts of one graph meet, also if a rank fails, or compiles another graph alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.distributed import HashStore  # type: ignore[attr-defined]

from streamfx.torch_private.ranks import RanksMissingError, _Board

ALL, FAILS_ALONE, FAILS = "all", "fails alone", "fails"
KINDS = some.sampled_from((ALL, FAILS, FAILS_ALONE))


def within(seconds: float) -> mock._patch[timedelta]:
    return mock.patch("streamfx.torch_private.ranks.WAIT_LIMIT", timedelta(seconds=seconds))


def board(store: HashStore, rank: int, subject: str = "graph", world: int = 2) -> _Board:
    return _Board(store, "texts", tuple(range(world)), rank, subject)


def heard(store: HashStore, rank: int, world: int, graphs: list[tuple[str, int]]) -> list[list[str] | None]:
    """Return the texts that a rank receives for each graph.

    All ranks compile it; or rank `who` fails at it, or at another graph that it compiles alone.
    """
    found: list[list[str] | None] = []
    for number, (kind, who) in enumerate(graphs):
        own = board(store, rank, f"graph{number}" if kind != FAILS_ALONE else "old", world)
        fails = kind != ALL and who % world == rank
        if fails:
            own.leave("failed")
        found.append(None if fails or kind == FAILS_ALONE else own.exchange(f"order {number}"))
    return found


@within(60)
@settings(max_examples=100, deadline=None)
@given(some.integers(2, 3), some.lists(some.tuples(KINDS, some.integers(0, 2)), max_size=6))
def test_texts_of_one_graph_meet(world: int, graphs: list[tuple[str, int]]) -> None:
    store = HashStore()
    with ThreadPoolExecutor(world) as threads:
        every = list(threads.map(lambda rank: heard(store, rank, world, graphs), range(world)))
    for number, (kind, who) in enumerate(graphs):
        failed = who % world if kind == FAILS else None
        texts = ["failed" if rank == failed else f"order {number}" for rank in range(world)]
        for rank, found in enumerate(every):
            assert found[number] == (None if kind == FAILS_ALONE or rank == failed else texts)


def test_a_timeout_names_the_missing_ranks() -> None:
    store = HashStore()
    board(store, 1, "other", 3).leave("failed")
    with within(0.3), pytest.raises(RanksMissingError, match="nothing from rank 1, 2 within"):
        board(store, 0, "graph", 3).exchange("an order")


@within(20)
def test_a_failure_is_received_once() -> None:
    """All ranks try again, with a smaller batch: the lines of code are the same."""
    store = HashStore()
    first, second = (board(store, rank) for rank in range(2))
    first.leave("failed")
    assert second.exchange("an order") == ["failed", "an order"]
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(second.exchange, "an order")
        time.sleep(0.1)  # it looks before the first one has written
        assert first.exchange("an order") == later.result() == ["an order"] * 2


def test_agreements_are_known_by_subject() -> None:
    own = board(HashStore(), 0, world=1)
    assert own.agreed("values") is None
    own.agree("values", "an order")
    assert own.agreed("values") == "an order" and own.agreed("other values") is None
