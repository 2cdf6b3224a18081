"""What tests of several processes rely on: a call gives what each rank made, or fails, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import BEGIN, RankFailed, on_ranks


def total(rank: int, factor: int) -> tuple[int, float]:
    ranks = torch.tensor(float(factor * rank))
    dist.all_reduce(ranks)
    return rank, ranks.item()


def test_each_rank_gives_its_own() -> None:
    assert on_ranks(total, 3, world=3) == [(0, 9.0), (1, 9.0), (2, 9.0)]


def changed(rank: int) -> tuple[torch.dtype, bool, int, bool]:
    """What is there when a call begins; all of it is changed afterwards."""
    found = torch.get_default_dtype(), "STREAMFX_TEST" in os.environ, torch.initial_seed(), BEGIN in sys.modules
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 1)
    os.environ["STREAMFX_TEST"] = "1"
    return found


def test_a_call_finds_nothing_of_the_one_before() -> None:
    first, second = on_ranks(changed), on_ranks(changed)
    assert first == second and first[0][:2] == (torch.float32, False)
    assert all(is_prepared for *_, is_prepared in first), "each rank has imported everything by itself"


def fails(rank: int) -> None:
    if rank:
        raise ValueError("no such axis")
    time.sleep(100)


def dies(rank: int) -> None:
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def waits(rank: int) -> None:
    time.sleep(100 * rank)


@pytest.mark.parametrize(("case", "words"), [(fails, "no such axis"), (dies, "SIGKILL"), (waits, "after 1 seconds")])
def test_a_rank_that_fails_ends_the_call_alone(case: Callable[[int], None], words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        on_ranks(case, limit=1 if case is waits else 60)
    assert on_ranks(total, 1) == [(0, 1.0), (1, 1.0)]
