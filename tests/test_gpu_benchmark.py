"""The benchmark for one GPU: its checks run without the distribution, it ends in time, and no figure is lost."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.checks import COMMANDS, Check
from benchmarks.gpu.command import CLOSING, ROOT, START, Journal, Schedule
from benchmarks.gpu.process import Worker, WorkerEndedError, WorkerTimeoutError
from benchmarks.gpu.table import MOST_LINES

BARE = ROOT / "tests" / "support" / "without_distribution"


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_all_checks_run_small(command: str, tmp_path: Path) -> None:
    """In a process that finds neither this distribution nor rich, as a checkout on a machine where nothing is installed."""
    line = [sys.executable, "-m", "benchmarks.gpu", command, "--device", "cpu", "--out", str(tmp_path), "--seconds", "3600"]
    paths = {"PYTHONPATH": str(BARE), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **paths}, check=False)
    assert not found.returncode, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert Path(records[0]["file"]).read_text().splitlines() == lines[: len(records)]
    assert len(lines) - len(records) <= MOST_LINES
    ended = {record["check"]: record["status"] for record in records if "seconds" in record and "check" in record}
    assert ended == {check.name: "done" for check in COMMANDS[command].checks}
    assert not any(record.get("off") for record in records), records


# -- time and figures


class Clock:
    """A clock that stands still unless somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A worker that gives prepared answers, each after some seconds; `None` as an answer: it ends by itself."""

    def __init__(self, clock: Clock, script: dict[str, list[tuple[float, Any]]]) -> None:
        self.clock, self.script, self.killed = clock, script, False
        self.coming: list[tuple[float, Any]] = [(5.0, {"device": "cpu", "small": False})]

    def ask(self, question: dict[str, Any]) -> None:
        self.coming += self.script[question["check"]]

    def answer(self, seconds: float) -> dict[str, Any]:
        delay, found = self.coming.pop(0)
        self.clock.now += min(delay, seconds)
        if delay > seconds:
            raise WorkerTimeoutError
        if found is None:
            raise WorkerEndedError("ended with code -11: Segmentation fault")
        return dict(found)

    def last_words(self) -> str:
        return "its last words"

    def kill(self) -> None:
        self.killed = True


DONE = {"end": "", "retire": ""}
FIGURE = {"check": "any", "case": "", "figures": {"s": 1.0}}


def scheduled(tmp_path: Path, seconds: float, script: dict[str, list[tuple[float, Any]]], starts: bool = True) -> Any:
    """Statuses, records, the workers that were started, and the seconds that it took to run all checks of a script."""
    clock, workers = Clock(), list[Scripted]()
    journal = Journal(tmp_path / "records.jsonl", clock)

    def start() -> Any:
        workers.append(Scripted(clock, script))
        if not starts:
            workers[-1].coming = [(4.0, None)]
        return workers[-1]

    begin = clock.now
    Schedule(seconds, False, journal, start, clock).run(deque(Check(name, "", 10.0, 10.0) for name in script))
    records = journal.records
    assert [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()] == records
    statuses = {record["check"]: record["status"] for record in records if "status" in record and "check" in record}
    return statuses, records, workers, clock.now - begin


FITS, SLOW, HANGS = [(9.0, FIGURE), (1.0, DONE)], [(25.0, DONE)], [(3.0, FIGURE), (1e9, DONE)]
DO_NOT_FIT: dict[str, tuple[float, dict[str, Any], list[str]]] = {
    "one too many": (35.0, {"a": FITS, "b": FITS, "c": HANGS}, ["done", "done", "left out"]),
    "on a slow machine": (80.0, {"a": SLOW, "b": SLOW, "c": SLOW}, ["done", "done", "left out"]),  # 23 s are left
    "one hangs": (40.0, {"a": HANGS, "b": FITS}, ["stopped", "left out"]),
}


@pytest.mark.parametrize("name", DO_NOT_FIT)
def test_the_budget_is_kept_and_no_finding_is_lost(name: str, tmp_path: Path) -> None:
    seconds, script, ends = DO_NOT_FIT[name]
    statuses, records, workers, taken = scheduled(tmp_path, seconds, script)
    assert list(statuses.values()) == ends and taken <= seconds - CLOSING
    assert len(workers) == 1 and workers[0].killed
    assert sum("figures" in record for record in records) == {"one too many": 2, "one hangs": 1}.get(name, 0)
    if "stopped" in ends:
        assert "its last words" in next(record["why"] for record in records if record.get("status") == "stopped")


@pytest.mark.parametrize("way", ["it ends", "it reports an error", "its device is unusable"])
def test_a_check_that_fails_does_not_end_the_others(way: str, tmp_path: Path) -> None:
    error = {"end": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    last = {"it ends": None, "it reports an error": {**error, "retire": ""}, "its device is unusable": {**error, "retire": "yes"}}
    statuses, records, workers, _ = scheduled(tmp_path, 300.0, {"a": [(1.0, FIGURE), (1.0, last[way])], "b": [(1.0, DONE)]})
    assert statuses | {"a": ""} == {"a": "", "b": "done"}
    why = next(record["why"] for record in records if record.get("status") == "failed")
    assert "Segmentation fault" in why or "illegal memory access" in why
    assert len(workers) == (1 if way == "it reports an error" else 2)


def test_where_no_worker_starts_no_time_is_wasted(tmp_path: Path) -> None:
    statuses, _, workers, _ = scheduled(tmp_path, 300.0, dict.fromkeys("abc", FITS), starts=False)
    assert statuses == {"a": "failed", "b": "left out", "c": "left out"} and len(workers) == 1


# -- processes


def test_a_killed_worker_takes_along_what_it_started(tmp_path: Path) -> None:
    """A compiler's worker, say, which would keep memory of the GPU."""
    program = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"child": child.pid}), flush=True)
time.sleep(600)
"""
    worker = Worker([sys.executable, "-c", program], os.environ, tmp_path / "errors")
    child = worker.answer(60)["child"]
    assert is_alive(child)
    with pytest.raises(WorkerTimeoutError):
        worker.answer(0.1)
    worker.kill()
    end = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_terminated_command_ends_its_worker_and_prints_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "kernels", "--device", "cpu", "--out", str(tmp_path), "--only", "versions"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert "file" in json.loads(process.stdout.readline())
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(60) == 1 and "interrupted" in rest and "checks done" in rest


# -- the table, and the command line


def test_budgets_hold_what_matters_most() -> None:
    """The first checks of each command fit into its budget on an H100; names are told apart."""
    for command in COMMANDS.values():
        names = [check.name for check in command.checks]
        assert len(set(names)) == len(names)
        assert START[False] + CLOSING + sum(check.seconds for check in command.checks[:6]) < command.seconds
    assert [command.seconds for command in COMMANDS.values()] == [240, 420]


@pytest.mark.parametrize("module", ["table", "measures", "kernels"])
def test_examples_in_docstrings_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"benchmarks.gpu.{module}"))
    assert found.attempted and not found.failed
