"""The progress line: on a terminal, after some seconds, and erased at the end."""

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamfx import progress
from streamfx.progress import ERASE, Tally, periodic_lines, show_activity
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal; the line appears at once."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=(stream := Terminal())))  # pytest replaces stderr
    return stream


def lines(terminal: Terminal) -> list[str]:
    """Return the shown texts, each of which replaced the one before."""
    return [text for text in terminal.getvalue().split(ERASE) if text]


def step(**options: Any) -> None:
    ids = tokens(2, 64)
    torch.compile(Causal(), backend="streambp", options={"chunk_size": 16, **options})(ids, ids).backward()


def test_a_step_shows_its_phase_and_erases_the_line(terminal: Terminal) -> None:
    step(bodies="eager")
    assert lines(terminal) == ["streamfx: tracing ...", "streamfx: tracing, planning ...", "streamfx: tracing ..."]
    assert terminal.getvalue().endswith(ERASE)


def test_outer_activities_that_do_not_fit_onto_the_line_are_omitted(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with show_activity("planning a step"), show_activity("looking for something that fits" + "!" * 9):
        pass
    assert lines(terminal)[1] == "streamfx: looking for something that fi"
    with show_activity("planning a step"), show_activity("looking"):
        pass
    assert "streamfx: planning a step, looking ..." in lines(terminal)


def test_bodies_are_counted(terminal: Terminal) -> None:
    """Without Inductor: only the first compilation of a body counts."""
    tally = Tally("compiling", 2, "auto")
    for _ in range(3):
        with tally.next_activity():
            pass
    shown = [f"streamfx: compiling {number} ..." for number in ("1 of 2", "2 of 2", "for other lengths")]
    assert lines(terminal) == shown


def test_quick_activities_and_other_ranks_show_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, show_activity("something"):
        patched.setenv("LOCAL_RANK", "1")
        with show_activity("else"):
            pass
    monkeypatch.setattr(progress, "DELAY", 30.0)
    with show_activity("quick"):
        pass
    assert lines(terminal) == ["streamfx: something ..."]


def test_the_option_shows_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
        with show_activity("something"), show_activity("off", option=False), show_activity("on", option=stream is None):
            pass
    assert stream is not None and stream.getvalue() == ""
    step(bodies="eager", progress=True)
    assert stream.getvalue().splitlines()[:2] == ["streamfx: tracing ...", "streamfx: tracing, planning ..."]


def test_a_long_activity_is_shown_while_it_runs(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.05)
    with show_activity("waiting"):
        assert terminal.getvalue() == ""
        end = time.monotonic() + 30
        while not terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    monkeypatch.setattr(progress, "DELAY", 100.0)
    with show_activity("compiling", since=time.monotonic() - 101):
        assert lines(terminal) == ["streamfx: waiting ...", "streamfx: compiling ..."]


def test_a_command_without_a_terminal_writes_lines_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the text stays the same; nothing is erased."""
    monkeypatch.setattr(progress, "INTERVAL", 0.02)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=(stream := io.StringIO())))
    with periodic_lines(), show_activity("planning"):
        end = time.monotonic() + 30
        while stream.getvalue().count("\n") < 2 and time.monotonic() < end:
            time.sleep(0.01)
    shown = stream.getvalue().splitlines()
    assert len(shown) >= 2 and set(shown) == {"streamfx: planning ... 0 s"}
    with show_activity("training"):  # not of a command
        assert not progress.is_shown("auto")


def test_an_error_erases_the_line(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), show_activity("failing"):
        _ = 1 / 0
    assert lines(terminal) == ["streamfx: failing ..."] and terminal.getvalue().endswith(ERASE)
    with show_activity("writing"):
        terminal.close()  # a closed terminal is no error
