"""What tests of several processes rely on: a call fails where a rank does, or waits too long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.support.ranks import RankFailed, on_ranks


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
