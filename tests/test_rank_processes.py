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


def changed(rank: int, factor: int) -> tuple[float, torch.dtype, int, bool]:
    """The sum over the ranks, and what is there when a call begins; all of it is changed afterwards."""
    found = torch.tensor(float(factor * rank)), torch.get_default_dtype(), torch.initial_seed(), BEGIN in sys.modules
    dist.all_reduce(found[0])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 1)
    return found[0].item(), *found[1:]


def test_each_rank_gives_its_own_and_finds_nothing_of_the_call_before() -> None:
    first, second = on_ranks(changed, 3, world=3), on_ranks(changed, 3, world=3)
    assert first == second == [(9.0, torch.float32, first[0][2], True)] * 3


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
def test_a_rank_that_fails_ends_the_call(case: Callable[[int], None], words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        on_ranks(case, limit=1 if case is waits else 60)
