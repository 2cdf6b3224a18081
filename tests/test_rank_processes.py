"""`on_ranks` fails if a rank fails, dies, or takes too long."""

import os
import signal
import time

import pytest

from tests.support.ranks import RankFailed, on_ranks


def failing(rank: int, how: str) -> None:
    if rank and how == "error":
        raise ValueError("no such axis")
    if rank and how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.parametrize(("how", "words"), [("error", "no such axis"), ("signal", "SIGKILL"), ("none", "after 1 seconds")])
def test_a_call_fails_with_a_rank(how: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        on_ranks(failing, how, limit=1 if how == "none" else 60)
