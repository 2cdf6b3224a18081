"""Trials of kernels in a child process: its answers, its crashes, and what is kept of them."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamfx.kernels import kernel_selftest, plain_attention
from streamfx.kernels.kernel_selftest import Child, Outcome
from streamfx.kernels.plain_attention import BottomRightCausal

QUESTION = {"check": f"{__name__}:even", "arguments": [4], "flash": None, "device": "cpu"}
# A child that treats a question by its argument: it answers, dies of a signal, fails, says nothing, or talks first.
SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
    number = json.loads(line)["arguments"][0]
    if number == -11:
        os.kill(os.getpid(), 11)
    if number == 1:
        sys.exit("CUDA error: an illegal memory access was encountered")
    if number == 60:
        time.sleep(60)
    print(json.dumps([number % 2 == 0, "", True]), flush=True)
"""


@kernel_selftest.isolated("even numbers")
def even(device: torch.device, number: int) -> bool:
    print("what a library has to say")
    if number == -3:
        raise RuntimeError("Triton Error [CUDA]: out of memory")  # the driver has no memory left for a kernel's code
    if number < 0:
        raise torch.OutOfMemoryError("no room")
    if number == 7:
        raise RuntimeError("there is no such kernel")
    return number % 2 == 0


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    made.command = [sys.executable, "-c", SCRIPT]
    yield made
    made.stop()


def asked(child: Child, number: int) -> Outcome:
    return child.answer({**QUESTION, "arguments": [number]})


def test_a_crash_ends_the_child_and_nothing_else(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(child, 4) == (True, "", True)
    first = child._process
    assert asked(child, 6).is_right and child._process is first
    crash = asked(child, -11)
    assert not crash.is_right and "code -11" in crash.why and not crash.lasts
    failure = asked(child, 1)
    assert not failure.is_right and "illegal memory access" in failure.why and not failure.lasts
    assert asked(child, 4).is_right and child._process is not first
    monkeypatch.setattr(kernel_selftest, "LONGEST", 0.2)
    silence = asked(child, 60)
    assert not silence.is_right and "said nothing" in silence.why and child._process is None


ODD = {  # what a child does with its first question, and what is said of it
    "print('null', flush=True)": "gave an answer that cannot be read",
    "print('[true]', flush=True)": "gave an answer that cannot be read",
    "print('[' * 100000, flush=True)": "gave an answer that cannot be read",
    "print(flush=True)": "gave an answer that cannot be read",
    "os.write(1, b'[tr'); time.sleep(60)": "said nothing for 1 s",
    "subprocess.Popen(['sleep', '60']); time.sleep(60)": "said nothing for 1 s",
    "os.write(2, b'\\xff'); sys.exit(3)": "ended with code 3 (\ufffd)",
    "os.close(1); time.sleep(60)": "closed its answers, and has not ended in 1 s",
}


@pytest.mark.parametrize("does", ODD)
def test_whatever_a_child_does_is_an_outcome(does: str, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_selftest, "LONGEST", 1)
    monkeypatch.setattr(kernel_selftest, "ENDING", 1)
    child.command = [sys.executable, "-c", f"import os, subprocess, sys, time; sys.stdin.readline(); {does}"]
    begun = time.monotonic()
    assert asked(child, 4) == (False, f"the process that tried them {ODD[does]}", False)
    assert time.monotonic() - begun < 20


def test_a_child_that_is_ending_is_asked_for_nothing(child: Child) -> None:
    """It ends because nobody asked; the question that comes meanwhile is another child's."""
    child.command = [sys.executable, "-c", "import time; input(); print('[true, \"\", true]', flush=True); time.sleep(0.5)"]
    assert [asked(child, 4) for _ in range(2)] == [(True, "", True)] * 2


def test_a_user_without_a_home_keeps_nothing(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    kernel_selftest._folder.cache_clear()
    try:
        kernel_selftest._keep("question", Outcome(True, ""))
        assert kernel_selftest._kept() == {}
    finally:
        kernel_selftest._folder.cache_clear()


@pytest.mark.parametrize("width", range(8, 257, 8))
def test_kernels_that_only_round_pass(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number that a trial compares is what cancelling leaves of larger ones, in which rounding is large."""
    monkeypatch.setattr(kernel_selftest, "CLOSE", kernel_selftest.CLOSE / 4)
    for causal, queries, keys in (
        (False, (4, 128), (2, 384)),
        (True, (4, 128), (2, 128)),
        (BottomRightCausal(3), (2, 7), (1, 12)),
    ):
        sizes = kernel_selftest.AttentionSizes(torch.device("cpu"), torch.bfloat16, queries, keys, width)
        assert kernel_selftest.agree(
            lambda q, k, v: plain_attention.forward(q, k, v, None, causal, None),  # noqa: B023
            lambda g, q, k, v, out, lse: plain_attention.backward(g, q, k, v, out, lse, None, causal, None),  # noqa: B023
            causal,
            sizes,
        )


def test_without_a_child_no_kernel_is_used(child: Child) -> None:
    child.command = ["/there/is/no/python"]
    found = asked(child, 4)
    assert not found.is_right and "no process could be started" in found.why and not found.lasts


def test_a_real_child_answers_one_question_after_the_other() -> None:
    child = Child()
    try:
        assert [asked(child, number) for number in (4, 5)] == [
            (True, "", True),
            (False, "they give other numbers than plain operators do", True),
        ]
        assert asked(child, 7).why == "they do not run (RuntimeError: there is no such kernel)"
        assert asked(child, -2) == (False, "they do not run (OutOfMemoryError: no room)", False)
        assert asked(child, -3) == (False, "they do not run (RuntimeError: Triton Error [CUDA]: out of memory)", False)
    finally:
        child.stop()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: Child) -> Iterator[Any]:
    """A CUDA device as far as trials ask for one, with the child of this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(kernel_selftest, "_CHILD", child)
    kernel_selftest._folder.cache_clear()
    even.cache_clear()
    yield tmp_path / "streamfx" / "trials.json"
    kernel_selftest._folder.cache_clear()
    even.cache_clear()


def test_a_machine_pays_for_a_trial_once(card: Path, child: Child, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": [1]}', "{", "\x00"])
def test_a_file_of_somebody_else_is_no_answer(text: str, card: Path) -> None:
    card.parent.mkdir()
    card.write_text(text)
    assert even(torch.device("cuda"), 4)
    assert [Outcome(*item) for item in json.loads(card.read_text()).values()] == [(True, "", True)]


def test_a_folder_that_cannot_be_written_costs_a_trial(card: Path) -> None:
    card.parent.write_text("a file where the folder should be")
    assert even(torch.device("cuda"), 4)
