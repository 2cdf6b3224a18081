"""Self-tests of kernels in a child process: answers, crashes, and cached outcomes."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamfx.kernels import kernel_selftest
from streamfx.kernels.kernel_selftest import Child, Outcome
from tests.support.tables import named_cases

QUESTION = {"check": f"{__name__}:even", "arguments": [4], "flash": None, "device": "cpu"}
# A child that treats a question by its argument: it answers, dies of a signal, or fails.
SCRIPT = """
import json, os, sys
for line in sys.stdin:
    number = json.loads(line)["arguments"][0]
    if number == -11:
        os.kill(os.getpid(), 11)
    if number == 1:
        sys.exit("CUDA error: an illegal memory access was encountered")
    print(json.dumps([number % 2 == 0, "", True]), flush=True)
"""


@kernel_selftest.selftest("even numbers")
def even(device: torch.device, number: int) -> bool:
    print("what a library has to say")
    errors = {
        -3: RuntimeError("Triton Error [CUDA]: out of memory"),  # the driver has no memory left for a kernel's code
        -2: torch.OutOfMemoryError("no room"),
        7: RuntimeError("there is no such kernel"),
    }
    if number in errors:
        raise errors[number]
    return number % 2 == 0


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    made.command = [sys.executable, "-c", SCRIPT]
    yield made
    made.stop()


def asked(child: Child, number: int) -> Outcome:
    return child.answer({**QUESTION, "arguments": [number]})


def test_a_crash_ends_only_the_child(child: Child) -> None:
    assert asked(child, 4) == (True, "", True)
    first = child._process
    assert asked(child, 6).is_correct and child._process is first
    for number, why in ((-11, "code -11"), (1, "illegal memory access")):
        crash = asked(child, number)
        assert not crash.is_correct and why in crash.reason and not crash.is_permanent
    assert asked(child, 4).is_correct and child._process is not first


ODD = named_cases("unexpected behavior", globals())


@pytest.mark.parametrize("does", ODD)
def test_unexpected_child_behavior_is_a_failed_trial(does: str, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_selftest, "TEST_SECONDS", 1 if "for 1 s" in ODD[does] else 30)  # a busy machine is slow
    monkeypatch.setattr(kernel_selftest, "EXIT_SECONDS", 1)
    child.command = [sys.executable, "-c", f"import os, subprocess, sys, time; sys.stdin.readline(); {does}"]
    begun = time.monotonic()
    assert asked(child, 4) == (False, f"the process that tested them {ODD[does]}", False)
    assert time.monotonic() - begun < 20 and child._process is None


@pytest.mark.compiled
def test_a_child_answers_several_questions(child: Child) -> None:
    child.command = Child().command
    for number, outcome in {
        4: (True, "", True),
        5: (False, "their results differ from those of plain operators", True),
        7: (False, "they do not run (RuntimeError: there is no such kernel)", True),
        -2: (False, "they do not run (OutOfMemoryError: no room)", False),
        -3: (False, "they do not run (RuntimeError: Triton Error [CUDA]: out of memory)", False),
    }.items():
        assert asked(child, number) == outcome


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: Child) -> Iterator[Path]:
    """A CUDA device as far as trials ask for one, with the child of this file; the file that answers are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(kernel_selftest, "_CHILD", child)
    kernel_selftest._cache_folder.cache_clear()
    even.cache_clear()
    yield tmp_path / "streamfx" / "trials.json"
    kernel_selftest._cache_folder.cache_clear()
    even.cache_clear()


def test_results_of_trials_are_cached_per_device(card: Path, child: Child, caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    with caplog.at_level(logging.WARNING, "streamfx"):
        assert even(device, 4) and not even(device, 5) and not even(device, -11)
        assert not even(device, 5)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["even numbers"] * 2
    assert sorted(outcome[0] for outcome in json.loads(card.read_text()).values()) == [False, True]  # no crash is kept
    even.cache_clear()
    child.command = ["/there/is/no/python"]
    child.stop()
    assert even(device, 4) and not even(device, 5)
    assert not even(torch.device("cuda", 1), 4)  # another card


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": [1]}', "\x00"])
def test_an_unreadable_cache_file_is_replaced(text: str, card: Path) -> None:
    card.parent.mkdir()
    card.write_text(text)
    assert even(torch.device("cuda"), 4)
    assert [Outcome(*item) for item in json.loads(card.read_text()).values()] == [(True, "", True)]


def test_nothing_is_cached_without_a_home_directory(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert even(torch.device("cuda"), 4) and kernel_selftest._cached_outcomes() == {}
