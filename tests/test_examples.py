"""Each example in its short form: both ways end with the same losses and weights."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.long

pytest.importorskip("transformers")
pytest.importorskip("rich")

FOLDER = Path(__file__).parents[1] / "examples"
NEEDS = {"custom_loss": (), "distillation": (), "dpo_lora": ("trl", "peft", "datasets"), "grpo": ("trl", "datasets")}


class Interrupting(nullcontext[None]):
    """A progress bar that is interrupted at a way's first step."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.tasks = 0

    def __enter__(self) -> Interrupting:  # type: ignore[override]
        return self

    def add_task(self, *_: Any, **__: Any) -> int:
        self.tasks += 1
        return self.tasks

    def update(self, task: int, advance: int = 0, **_: Any) -> None:
        if advance and task == self.tasks and self.tasks > INTERRUPTED_AT:
            raise KeyboardInterrupt


INTERRUPTED_AT = 2  # the bars of reading and of the first way, or of both ways that were finished
TOLD = {"loss": 1.0, "value": 1.0, "seconds": 1.0, "peak": 1, "difference": 0.0, "tolerance": 1e-4}


@pytest.mark.parametrize(("name", "finished"), [("train_long_context", 1), ("side_by_side", 2)])
def test_an_interrupt_keeps_what_is_finished(
    name: str, finished: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C: the rows so far, no traceback, an exit code that says so, and no process left behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    example = importlib.import_module(name)
    children: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def popen(command: list[str], **keywords: Any) -> subprocess.Popen[str]:
        program = f"print({json.dumps(TOLD)!r}, flush=True)"
        if len(children) == finished:
            program += "; import time; time.sleep(600)"
        children.append(start([sys.executable, "-S", "-c", program], **keywords))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("rich.progress.Progress", Interrupting)
    monkeypatch.setattr("workload.token_batches", lambda *_: torch.zeros(1))
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--json"])
    monkeypatch.setitem(example.METHODS, "third", "one more")
    with pytest.raises(SystemExit) as ended:
        example.main() if name == "train_long_context" else example.compare(None, example.arguments("", 1, 1))
    assert ended.value.code == 130
    assert len(children) == finished + 1
    assert children[-1].poll() is not None
    printed = capsys.readouterr()
    assert len(json.loads(printed.out.splitlines()[-1])["rows"]) == finished
    assert f"interrupted: {finished} of" in printed.err


@pytest.fixture
def long_context(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("train_long_context")


def test_the_table_has_shares_and_says_what_is_rounding(long_context: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ("eager", 3 << 20, None), ("checkpointing", 2 << 20, 0.0), ("streambp", 1 << 20, 0.5)
    rows = [long_context.row(way, [{**TOLD, "peak": peak, "difference": difference}]) for way, peak, difference in ways]
    long_context.print_table(rows, "three ways")
    eager, usual, ours = (line for line in capsys.readouterr().out.splitlines() if "MiB" in line)
    assert "3 MiB (1.50)" in eager and " - " in eager
    assert "2 MiB (1.00)" in usual and "\u2713 0.0e+00" in usual
    assert "1 MiB (0.50)" in ours and "\u2717 5.0e-01" in ours
    long_context.print_table([rows[0], {"method": "gradient checkpointing", "failed": "out of memory"}], "two ways")
    printed = capsys.readouterr().out
    assert "out of memory" in printed and "(" not in printed


def test_what_is_compiled_is_shown_and_what_fails_is_kept(long_context: Any, tmp_path: Path) -> None:
    shown: list[str] = []
    said = "streamfx: compiling 3 of 6 ...\nstreamfx: a model is not trained\nValueError: no\n"
    progress, errors = SimpleNamespace(update=lambda bar, loss: shown.append(loss)), tmp_path / "errors.txt"
    long_context.heard(SimpleNamespace(stderr=StringIO(said)), errors, 0, progress)
    assert shown == ["compiling 3 of 6 ..."]
    assert errors.read_text() == said.split("\n", 1)[1]


@pytest.mark.parametrize("name", NEEDS)
def test_quick(name: str) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    if name == "dpo_lora":
        try_peft()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STREAMFX_OPTIONS": '{"chunk_size": 32, "loss_chunk_size": 32}'}
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"{name}.py"), "--quick", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    plain, streamed = json.loads(result.stdout.strip().splitlines()[-1])["rows"]
    assert streamed["method"] == "streambp"
    assert abs(streamed["value"] - plain["value"]) <= 1e-4 * max(1, abs(plain["value"]))
    assert streamed["weights_difference"] < 1e-5
    assert min(plain["peak_bytes"], streamed["peak_bytes"]) > 0


def try_peft() -> None:
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        pytest.skip(f"PEFT makes no adapters here: {error}")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "simple_fsdp", "tensor_parallel", "recurrent"])
def test_two_ranks_are_one_process(name: str) -> None:
    """As torchrun starts them; the script fails where weights differ."""
    script, environment = FOLDER / "distributed" / f"{name}.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 ranks and one process differ by" in done.stdout
