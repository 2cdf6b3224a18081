"""The benchmark for one GPU: its checks run without the distribution, it ends in time, and no figure is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.checks import COMMANDS, Check
from benchmarks.gpu.command import CLOSING, ROOT, START, Journal, Schedule, run
from benchmarks.gpu.place import Place
from benchmarks.gpu.process import Worker, WorkerEndedError, WorkerTimeoutError
from benchmarks.gpu.table import MOST_LINES, closing

BARE = ROOT / "tests" / "support" / "without_distribution"
DEFAULT = {
    "kernels": ["versions", "products", "experts", "rates, 8K", "attention of documents", "GPT-OSS, packed", "dropout: Llama"],
    "steps": ["streambp, 8K", "checkpointing, loss in chunks, 8K"],
}


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_checks_run_without_the_distribution(command: str, tmp_path: Path) -> None:
    """No entry point names the backend and there is no rich, as in a checkout on a machine where nothing is installed."""
    records = ran_bare(command, tmp_path, 600, DEFAULT[command])
    done = {record["check"] for record in records if record.get("status") == "done"}
    assert len(done) == len(DEFAULT[command])
    assert done == {record["check"] for record in records if "figures" in record}
    assert not any(record.get("off") or record.get("status") in ("failed", "stopped") for record in records), records


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_all_checks_run_small(command: str, tmp_path: Path) -> None:
    records = ran_bare(command, tmp_path, 3600, [])
    ended = {record["check"]: record["status"] for record in records if "seconds" in record and "check" in record}
    assert ended == {check.name: "done" for check in COMMANDS[command].checks}
    assert not any(record.get("off") for record in records), records


def ran_bare(command: str, folder: Path, seconds: float, names: Sequence[str]) -> list[dict[str, Any]]:
    """The records that a command printed, in a process that finds neither this distribution nor rich."""
    line = [sys.executable, "-m", "benchmarks.gpu", command, "--device", "cpu", "--out", str(folder), "--seconds", str(seconds)]
    line += ["--only", *names] if names else []
    paths = {"PYTHONPATH": str(BARE), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    found = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **paths}, check=False)
    assert not found.returncode, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert Path(records[0]["file"]).read_text().splitlines() == lines[: len(records)]
    assert len(lines) - len(records) <= MOST_LINES
    return records


@pytest.mark.long
@pytest.mark.parametrize("model", ["GPT-OSS", "Bamba"])
def test_bodies_of_all_models_compile(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small form compiles those of the other model."""
    from benchmarks.gpu import models

    monkeypatch.setattr(models, "COMPILED", (model, "plain"))
    findings = list(models.gradients(Place("cpu", True), model, "plain"))
    assert findings and not any(finding.off for finding in findings), findings


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


def scheduled(
    tmp_path: Path, seconds: float, script: dict[str, list[tuple[float, Any]]], expected: float = 10.0
) -> tuple[list[dict[str, Any]], list[Scripted], float]:
    """Records, the workers that were started, and the seconds that it took to run all checks of a script."""
    clock, workers = Clock(), list[Scripted]()
    journal = Journal(tmp_path / "records.jsonl", clock)

    def start() -> Any:
        workers.append(Scripted(clock, script))
        return workers[-1]

    begin = clock.now
    Schedule(seconds, False, journal, start, clock).run(deque(Check(name, "", expected, expected) for name in script))
    assert [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()] == journal.records
    return journal.records, workers, clock.now - begin


def statuses(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {record["check"]: record["status"] for record in records if "status" in record and "check" in record}


def test_a_check_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    fits, endless = [(9.0, FIGURE), (1.0, DONE)], [(1e9, DONE)]
    records, workers, taken = scheduled(tmp_path, 35.0, {"a": fits, "b": fits, "c": endless})
    assert statuses(records) == {"a": "done", "b": "done", "c": "left out"}
    assert len(workers) == 1 and workers[0].killed and taken == 25.0


def test_checks_on_a_slow_machine_are_expected_to_take_longer(tmp_path: Path) -> None:
    slow = [(25.0, DONE)]
    records, _, taken = scheduled(tmp_path, 80.0, {"a": slow, "b": slow, "c": slow})
    assert statuses(records) == {"a": "done", "b": "done", "c": "left out"}  # 23 s are left, 10 s were expected at first
    assert taken < 80.0


def test_the_budget_is_kept_and_findings_before_a_stop_are_not_lost(tmp_path: Path) -> None:
    hangs = [(3.0, FIGURE), (1e9, DONE)]
    records, workers, taken = scheduled(tmp_path, 40.0, {"a": hangs, "b": [(1.0, DONE)]})
    assert [record["check"] for record in records if "figures" in record] == ["any"]
    assert statuses(records) == {"a": "stopped", "b": "left out"}
    assert taken <= 40.0 - CLOSING and workers[0].killed
    assert "its last words" in next(record["why"] for record in records if record.get("status") == "stopped")


@pytest.mark.parametrize("way", ["it ends", "it reports an error", "its device is unusable"])
def test_a_check_that_fails_does_not_end_the_others(way: str, tmp_path: Path) -> None:
    error = {"end": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    last = {"it ends": None, "it reports an error": {**error, "retire": ""}, "its device is unusable": {**error, "retire": "yes"}}
    records, workers, _ = scheduled(tmp_path, 300.0, {"a": [(1.0, FIGURE), (1.0, last[way])], "b": [(1.0, DONE)]})
    assert statuses(records) | {"a": ""} == {"a": "", "b": "done"}
    why = next(record["why"] for record in records if record.get("status") == "failed")
    assert "Segmentation fault" in why or "illegal memory access" in why
    assert len(workers) == (1 if way == "it reports an error" else 2)


def test_where_no_worker_starts_no_time_is_wasted(tmp_path: Path) -> None:
    clock, started = Clock(), list[Scripted]()
    journal = Journal(tmp_path / "records.jsonl", clock)

    def start() -> Any:
        started.append(Scripted(clock, {}))
        started[-1].coming = [(4.0, None)]
        return started[-1]

    Schedule(300.0, False, journal, start, clock).run(deque(Check(name, "", 1.0, 1.0) for name in "abc"))
    assert statuses(journal.records) == {"a": "failed", "b": "left out", "c": "left out"}
    assert len(started) == 1


# -- processes


def test_a_killed_worker_takes_along_what_it_started(tmp_path: Path) -> None:
    """A compiler's worker, say, which would keep memory of the GPU."""
    grandchild = "import time; time.sleep(600)"
    program = (
        "import json, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        "print(json.dumps({'child': child.pid}), flush=True)\n"
        "time.sleep(600)\n"
    )
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


def test_a_worker_that_ends_says_its_last_words(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "print('{\"one\": 1}', flush=True)\n"
        "print('CUDA error: an illegal memory access', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    worker = Worker([sys.executable, "-c", program], os.environ, tmp_path / "errors")
    assert worker.answer(60) == {"one": 1}
    with pytest.raises(WorkerEndedError, match="code 3: CUDA error: an illegal memory access"):
        worker.answer(60)
    worker.ask({"check": "any"})  # nobody hears it


def test_a_command_fails_if_a_check_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real worker, which goes on after an error, and says where it came from."""
    products = next(check for check in COMMANDS["kernels"].checks if check.name == "products")
    assert run("kernels", [products, products], 600.0, tmp_path, "no such device", True) == 1
    out = capsys.readouterr().out
    assert out.count('"status": "failed"') == 2 and out.count('"status": "worker"') == 1
    assert "failed: products: RuntimeError: " in out and "(benchmarks/gpu/" in out and "no such device" in out


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


def test_the_table_is_short_whatever_was_found() -> None:
    figures = {f"a figure with a long name, number {i}, GiB": 1.234 for i in range(12)}
    found = [{"check": f"check {i}", "case": f"case {i}", "figures": figures, "off": i % 7 == 0} for i in range(500)]
    ended = [{"check": f"check {i}", "status": "failed", "seconds": 1.0, "why": "x" * 900} for i in range(300)]
    lines = closing([*found, *ended])
    assert len(lines) <= MOST_LINES and len("\n".join(lines)) < 9000
    assert any("failed: check 0" in line for line in lines) and any("check 0 | case 0" in line for line in lines)


def test_details_are_shown_only_where_they_are_off() -> None:
    fine, off = (
        {"check": "c", "case": case, "figures": {"e": 1.0}, "detail": True, "off": case == "off"} for case in ("fine", "off")
    )
    text = "\n".join(closing([fine, off, {"check": "c", "status": "done", "seconds": 1.0}]))
    assert "c | off" in text and "OFF" in text and "c | fine" not in text


def test_a_name_that_matches_no_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu.__main__ import main

    with pytest.raises(SystemExit):
        main(["steps", "--only", "no such check"])
    assert "matches no check; there are: streambp, 8K;" in capsys.readouterr().err


def test_budgets_hold_what_matters_most() -> None:
    """The first checks of each command fit into its budget on an H100; names are told apart."""
    for command in COMMANDS.values():
        names = [check.name for check in command.checks]
        assert len(set(names)) == len(names)
        assert START[False] + CLOSING + sum(check.seconds for check in command.checks[:6]) < command.seconds
    assert [command.seconds for command in COMMANDS.values()] == [240, 420]
