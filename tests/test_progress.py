"""The line that says what is being done: where somebody looks and it takes long, and gone at the end."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamfx import progress
from streamfx.progress import ERASE, Tally, show_activity
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One that shows everything at once."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=(made := Terminal())))  # pytest sets its own for each phase
    torch._dynamo.reset()
    return made


def lines(terminal: Terminal) -> list[str]:
    """The texts that were shown, one over the other."""
    return [text for text in terminal.getvalue().split(ERASE) if text]


def step(**options: Any) -> None:
    ids = tokens(2, 64)
    torch.compile(Causal(), backend="streambp", options={"chunk_size": 16, **options})(ids, ids).backward()


def test_a_step_says_what_it_is_at_and_leaves_nothing(terminal: Terminal) -> None:
    step(bodies="eager")
    assert lines(terminal) == ["streamfx: tracing ...", "streamfx: tracing, planning ...", "streamfx: tracing ..."]
    assert terminal.getvalue().endswith(ERASE)


def test_bodies_are_counted(terminal: Terminal) -> None:
    """By a stand-in for Inductor: what is counted are stretches that are met for the first time."""
    tally = Tally("compiling", 2, "auto")
    for _ in range(3):
        with tally.next_activity():
            pass
    shown = [f"streamfx: compiling {number} ..." for number in ("1 of 2", "2 of 2", "for other lengths")]
    assert lines(terminal) == shown


def plain(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=(made := io.StringIO())))
    return made


def test_nothing_is_shown_to_who_is_quick_or_looks_elsewhere(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by any but the first process of a machine, or where there is no terminal."""
    with monkeypatch.context() as patched, show_activity("something"):
        patched.setenv("LOCAL_RANK", "1")
        assert lines(terminal) == ["streamfx: something ..."]
        with show_activity("else"):
            pass
    monkeypatch.setattr(progress, "DELAY", 30.0)
    with show_activity("quick"):
        pass
    assert "else" not in terminal.getvalue() and "quick" not in terminal.getvalue()
    monkeypatch.setattr(progress, "DELAY", 0.0)
    told = plain(monkeypatch)
    with show_activity("something"), show_activity("off", option=False):
        pass
    assert told.getvalue() == ""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    with show_activity("nothing", option=True):
        pass


def test_who_asks_is_told_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    told = plain(monkeypatch)
    step(bodies="eager", progress=True)
    assert told.getvalue().splitlines()[:2] == ["streamfx: tracing ...", "streamfx: tracing, planning ..."]


def test_what_takes_long_in_one_piece_is_told_of_meanwhile(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """What began before, at once."""
    monkeypatch.setattr(progress, "DELAY", 0.05)
    with show_activity("waiting"):
        assert terminal.getvalue() == ""
        end = time.monotonic() + 30
        while not terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    monkeypatch.setattr(progress, "DELAY", 100.0)
    with show_activity("compiling", since=time.monotonic() - 101):
        assert lines(terminal) == ["streamfx: waiting ...", "streamfx: compiling ..."]


def test_an_error_leaves_nothing(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), show_activity("failing"):
        _ = 1 / 0
    assert lines(terminal) == ["streamfx: failing ..."] and terminal.getvalue().endswith(ERASE)
    with show_activity("writing"):
        terminal.close()  # a terminal that went away is no error
