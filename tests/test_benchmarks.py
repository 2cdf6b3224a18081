"""Benchmarks: all ways compute the same, ratios compare runs of one round, and figures become tables and charts.

The benchmark for one GPU runs without the distribution, ends in time, and loses no figure.
"""

import doctest
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu.checks import COMMANDS, Check
from benchmarks.gpu.command import CLOSING, ROOT, START, Journal, Schedule
from benchmarks.gpu.models import TINY
from benchmarks.gpu.process import Worker, WorkerEndedError, WorkerTimeoutError
from benchmarks.gpu.table import MOST_LINES
from benchmarks.settings import Settings
from benchmarks.training import Training
from benchmarks.turns import Outcome, in_turns
from benchmarks.ways import WAYS
from tests.support.spread import only

HEAD: dict[str, Any] = {"workload": "head", "length": 24, "sizes": {"width": 8, "vocabulary": 40}}
MLP: dict[str, Any] = {"workload": "mlp", "length": 24, "sizes": {"width": 8, "inner": 16, "parts": 3}}
DECODER: dict[str, Any] = {"workload": "decoder", "length": 24, "sizes": {**TINY, "num_hidden_layers": 2}}
OURS = ("checkpointing", "streambp, eager bodies")
SPECS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "head": (HEAD, ("checkpointing, loss in parts",)),
    "mlp": (MLP, ("checkpointing", "mini-sequences")),
    "decoder": (DECODER, ("checkpointing", "checkpointing, reentrant", "checkpointing, loss in parts")),
    "TRL's DPO": ({**DECODER, "workload": "TRL", "feed": "dpo"}, OURS),
    "TRL's GRPO": ({**DECODER, "workload": "TRL", "feed": "grpo"}, OURS),
    "DPO": ({**DECODER, "workload": "preferences", "feed": "dpo"}, OURS),
    "GRPO": ({**DECODER, "workload": "preferences", "feed": "grpo"}, OURS),
}


@pytest.mark.parametrize("name", only(["head", "mlp"], SPECS))
def test_all_ways_compute_the_same(name: str) -> None:
    spec, ways = SPECS[name]
    expected = Training("eager", **spec).step()
    for way in ways:
        assert (training := Training(way, **spec)).step() == pytest.approx(expected, rel=1e-5), way
        assert all(weight.grad is None for weight in training.work.module.parameters())


def test_a_way_that_cannot_run_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = in_turns({"ours": {"way": "checkpointing, CCE", "length": 8}}, 1, Settings())
    assert found["ours"].why_not == "cut_cross_entropy has CUDA kernels only"
    assert all(way.why_not("cpu") == "" for way in WAYS.values() if not way.package)
    with pytest.raises(SystemExit):
        main(["step", "--way", "eagre"])
    assert "no way is called 'eagre'" in capsys.readouterr().err


def test_ratios_compare_runs_of_one_round() -> None:
    one, other = Outcome(later=[{"s": 1.0}, {"s": 10.0}, {"s": 2.0}]), Outcome(later=[{"s": 2.0}, {"s": 20.0}, {"s": 2.0}])
    assert one.over(other, "s") == 0.5


def test_figures_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"way": "eager", "T": 8, "peak MiB": 2.0, "processor s": 1.0}, {"way": "inductor", "T": 8, "why not": "no compiler"}]
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.svg"
    figures.write_text(json.dumps({"machine": "a machine", "step": rows}))
    main(["--figures", str(figures), "--chart", str(chart)])
    assert "| eager | 8 | 2 | 1 |  |" in capsys.readouterr().out
    assert "<svg" in chart.read_text()


# -- the benchmark for one GPU

BARE = ROOT / "tests" / "support" / "without_distribution"


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_all_checks_run_small(command: str, tmp_path: Path) -> None:
    """In a process without this distribution and without rich, as a checkout on a bare machine."""
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
    """A clock that moves only if a worker is awaited."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A worker with prepared answers, each after some seconds; it ends at the answer `None`."""

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
    """Return statuses, records, started workers, and the seconds that all checks of a script took."""
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
ERROR = {"end": "RuntimeError: CUDA error: an illegal memory access was encountered"}
CRASHES = [(1.0, FIGURE), (1.0, None)]
SCRIPTS: dict[str, tuple[float, dict[str, Any], list[str], int, int]] = {  # seconds, answers; statuses, workers, figures
    "one too many": (35.0, {"a": FITS, "b": FITS, "c": HANGS}, ["done", "done", "left out"], 1, 2),
    "a slow machine": (80.0, {"a": SLOW, "b": SLOW, "c": SLOW}, ["done", "done", "left out"], 1, 0),  # 23 s are left
    "one hangs": (40.0, {"a": HANGS, "b": FITS}, ["stopped", "left out"], 1, 1),
    "one ends": (300.0, {"a": CRASHES, "b": FITS}, ["failed", "done"], 2, 2),
    "an error": (300.0, {"a": [(1.0, {**ERROR, "retire": ""})], "b": FITS}, ["failed", "done"], 1, 1),
    "an unusable device": (300.0, {"a": [(1.0, {**ERROR, "retire": "yes"})], "b": FITS}, ["failed", "done"], 2, 1),
}
WHY = {"stopped": "its last words", "failed": "Segmentation fault|illegal memory access"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_budget_is_kept_and_no_figure_is_lost(name: str, tmp_path: Path) -> None:
    seconds, script, ends, worker_count, figures = SCRIPTS[name]
    statuses, records, workers, taken = scheduled(tmp_path, seconds, script)
    assert list(statuses.values()) == ends and taken <= seconds - CLOSING
    assert len(workers) == worker_count and workers[-1].killed
    assert sum("figures" in record for record in records) == figures
    assert all(re.search(WHY[record["status"]], record["why"]) for record in records if record.get("status") in WHY)


def test_no_check_waits_if_no_worker_starts(tmp_path: Path) -> None:
    statuses, _, workers, _ = scheduled(tmp_path, 300.0, dict.fromkeys("abc", FITS), starts=False)
    assert statuses == {"a": "failed", "b": "left out", "c": "left out"} and len(workers) == 1


# -- processes


def test_killing_a_worker_kills_its_children(tmp_path: Path) -> None:
    """A compiler's worker would keep memory of the GPU."""
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
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_terminated_command_prints_its_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "kernels", "--device", "cpu", "--out", str(tmp_path), "--only", "versions"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert "file" in json.loads(process.stdout.readline())
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(60) == 1 and "interrupted" in rest and "checks done" in rest


# -- checks and table


def test_the_first_checks_fit_into_the_budget_of_their_command() -> None:
    """On an H100; each check has its own name."""
    for command in COMMANDS.values():
        names = [check.name for check in command.checks]
        assert len(set(names)) == len(names)
        assert START[False] + CLOSING + sum(check.seconds for check in command.checks[:6]) < command.seconds
    assert [command.seconds for command in COMMANDS.values()] == [240, 420]


@pytest.mark.parametrize("module", ["table", "measures", "kernels"])
def test_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"benchmarks.gpu.{module}"))
    assert found.attempted and not found.failed
