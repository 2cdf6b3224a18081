"""Benchmarks: all ways compute the same, ratios compare runs of one round, and figures become tables and charts.

The benchmark for one GPU runs without the distribution, ends in time, and loses no figure.
"""

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

from benchmarks.__main__ import main
from benchmarks.gpu.checks import COMMANDS, Check
from benchmarks.gpu.command import CLOSING, ROOT, START, Journal, Schedule
from benchmarks.gpu.models import TINY
from benchmarks.gpu.process import Worker, WorkerTimeoutError
from benchmarks.gpu.table import MOST_LINES
from benchmarks.phases import AFTER_PASSES, BEFORE_PASSES, SECOND, TOTAL, first_step_seconds
from benchmarks.settings import Settings
from benchmarks.training import Training
from benchmarks.turns import Outcome, in_turns
from benchmarks.ways import WAYS
from streamfx.options import Options
from streamfx.passes import pipeline
from tests.support.spread import only
from tests.support.tables import named_cases

HEAD: dict[str, Any] = {"workload": "head", "length": 24, "sizes": {"width": 8, "vocabulary": 40}}
MLP: dict[str, Any] = {"workload": "mlp", "length": 24, "sizes": {"width": 8, "inner": 16, "parts": 3}}
DECODER: dict[str, Any] = {"workload": "decoder", "length": 24, "sizes": {**TINY, "num_hidden_layers": 2}}
OURS = ("checkpointing", "streambp, eager bodies")
SPECS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = named_cases("workloads", globals())


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


@pytest.mark.long
@pytest.mark.compiled
def test_phases_of_a_first_step_add_up() -> None:
    found = first_step_seconds(Training("streambp, eager bodies", **DECODER, options={"chunk_size": 8, "loss_chunk_size": 8}))
    names = {a_pass.name for a_pass in pipeline(Options())}
    assert names <= found.keys() and {*BEFORE_PASSES, *AFTER_PASSES} == found.keys() - names
    assert sum(found.values()) - found[TOTAL] - found[SECOND] == pytest.approx(found[TOTAL])


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

WORKER = """
import json, os, sys, time
print(json.dumps({"device": "cpu", "small": False}), flush=True)
for line in sys.stdin:
    name = json.loads(line)["check"]
    print(json.dumps({"check": name, "figures": {"s": 1.0}}), flush=True)
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        sys.exit("Segmentation fault")
    spoils = name == "spoils the device"
    print(json.dumps({"end": "CUDA error" * spoils, "retire": "yes" * spoils}), flush=True)
"""
STATUSES = {"fits": "done", "crashes": "failed", "spoils the device": "failed", "hangs": "stopped", "too long": "left out"}


def scheduled(folder: Path, worker: str) -> tuple[dict[str, str], list[dict[str, Any]], list[Worker]]:
    """Return statuses, records and workers of checks that take a second, but for the last one, within a minute."""
    workers, journal = list[Worker](), Journal(folder / "records.jsonl", time.monotonic)

    def start() -> Worker:
        workers.append(Worker([sys.executable, "-c", worker], os.environ, folder / "errors"))
        return workers[-1]

    checks = deque(Check(name, "", 100.0 if name == "too long" else 1.0, 0.0) for name in STATUSES)
    Schedule(60.0, False, journal, start, time.monotonic).run(checks)
    assert [json.loads(line) for line in journal.path.read_text().splitlines()] == journal.records
    statuses = {record["check"]: record["status"] for record in journal.records if "status" in record and "check" in record}
    return {name: statuses[name] for name in STATUSES}, journal.records, workers


@pytest.mark.compiled
def test_the_budget_is_kept_and_no_figure_is_lost(tmp_path: Path) -> None:
    statuses, records, workers = scheduled(tmp_path, WORKER)
    assert statuses == STATUSES and len(workers) == 3
    assert sum("figures" in record for record in records) == len(STATUSES) - 1
    assert "Segmentation fault" in str(records) and "CUDA error" in str(records)


def test_no_check_waits_if_no_worker_starts(tmp_path: Path) -> None:
    statuses, _, workers = scheduled(tmp_path, "")
    assert [*statuses.values()] == ["failed", *["left out"] * 4] and len(workers) == 1


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
