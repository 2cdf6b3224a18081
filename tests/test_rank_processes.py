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


def found_and_changed(rank: int) -> tuple[torch.dtype, bool]:
    """What is there when a call begins, whatever the one before has changed."""
    found = torch.get_default_dtype(), BEGIN in sys.modules
    torch.set_default_dtype(torch.float64)
    return found


def test_a_call_finds_nothing_of_the_one_before() -> None:
    assert on_ranks(found_and_changed) == on_ranks(found_and_changed) == [(torch.float32, True)] * 2


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
