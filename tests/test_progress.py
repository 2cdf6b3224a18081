"""The line that says what is being done: where somebody looks and it takes long, and gone at the end."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import streamfx
from streamfx import progress
from streamfx.progress import ERASE, Tally, doing
from streamfx.tools.cli import main
from tests.support.small import Causal, tokens


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One that shows everything at once."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
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
        with tally.one():
            pass
    shown = [f"streamfx: compiling {number} ..." for number in ("1 of 2", "2 of 2", "for other lengths")]
    assert lines(terminal) == shown


@pytest.mark.long
def test_inductor_compiles_as_many_as_were_said(terminal: Terminal) -> None:
    step(bodies="inductor")
    found = [re.search(r"compiling (\d+) of (\d+)", line) for line in lines(terminal)]
    numbers = [(int(match[1]), int(match[2])) for match in found if match is not None]
    assert numbers and numbers == [(i, numbers[0][1]) for i in range(1, len(numbers) + 1)]


def test_who_is_quick_sees_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 30.0)
    step(bodies="eager")
    assert terminal.getvalue() == ""


def test_what_takes_long_in_one_piece_is_told_of_meanwhile(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with doing("waiting"):
        assert terminal.getvalue() == ""
        end = time.monotonic() + 30
        while not terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert lines(terminal) == ["streamfx: waiting ..."]


def test_what_began_before_is_told_of_at_once(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 100.0)
    with doing("compiling", since=time.monotonic() - 101):
        assert lines(terminal) == ["streamfx: compiling ..."]


def test_no_terminal_no_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=(plain := io.StringIO())))
    step(bodies="eager")
    assert plain.getvalue() == ""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    with doing("nothing", asked=True):
        pass


def test_the_option(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    step(bodies="eager", progress=False)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=(plain := io.StringIO())))
    torch._dynamo.reset()
    step(bodies="eager", progress=True)
    assert plain.getvalue().splitlines()[:2] == ["streamfx: tracing ...", "streamfx: tracing, planning ..."]
    with pytest.raises(streamfx.OptionError, match="allowed: 'auto', True, False"):
        streamfx.Options(progress="always")  # type: ignore[arg-type]


def test_one_process_of_a_machine_is_enough(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    step(bodies="eager")
    assert terminal.getvalue() == ""


def test_an_error_leaves_nothing(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), doing("failing"):
        _ = 1 / 0
    assert lines(terminal) == ["streamfx: failing ..."] and terminal.getvalue().endswith(ERASE)


def test_a_terminal_that_went_away_is_no_error(terminal: Terminal) -> None:
    with doing("writing"):
        terminal.close()


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("command", ["explain", "plan"])
def test_the_command_line_has_it(command: str, terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    assert main([command, str(tmp_path), "--seq", "64"]) == 0
    first, later = {
        "explain": ("explaining", "explaining, planning"),
        "plan": ("planning", "planning (1 x 64 tokens take "),
    }[command]
    assert lines(terminal)[0] == f"streamfx: {first} ..."
    assert any(line.startswith(f"streamfx: {later}") for line in lines(terminal))
    assert terminal.getvalue().endswith(ERASE)
    assert ERASE not in capsys.readouterr().out
