"""Runs an example with and without the backend, each way in a process of its own, and prints one table.

An example gives `compare` a function `work(method, options, report)` that trains one way: it calls `report.start()` before and
`report.step(value)` after each step, and `report.end(model)` at the end, whose weights are then held against the other way's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from streamfx.tools.inspect.peak_memory import PeakMemory

INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
METHODS = {"checkpointing": "gradient checkpointing", "streambp": "streambp"}


def arguments(description: str, length: int, steps: int) -> argparse.ArgumentParser:
    """What all examples can be asked for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--length", type=int, default=length, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the short form: a tiny model, 96 tokens, 2 steps")
    parser.add_argument("--json", action="store_true", help="print the table as JSON; progress goes to stderr")
    parser.add_argument("--work", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    return parser


def compare(
    work: Callable[[str, argparse.Namespace, Report], None], parser: argparse.ArgumentParser, measure: str = "loss"
) -> None:
    """Parse the command line and run the example; in a child process, run one way of it. `measure` is what steps report."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    options = parser.parse_args()
    if options.quick:
        options.length, options.steps = 96, 2
    if options.work:
        work(options.work[0], options, Report(options.work[0], Path(options.work[1])))
        return
    rows: list[dict[str, Any]] = []
    try:
        _all_ways(rows, options)
    except KeyboardInterrupt:
        _show(rows, options, measure)
        print(f"interrupted: {len(rows)} of {len(METHODS)} ways were finished", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    _show(rows, options, measure)


def _show(rows: list[dict[str, Any]], options: argparse.Namespace, measure: str) -> None:
    if options.json:
        print(json.dumps({"length": options.length, "steps": options.steps, "measure": measure, "rows": rows}))
    elif rows:
        _print_table(rows, measure, f"{Path(sys.argv[0]).stem}: {options.steps} steps on sequences of {options.length:,} tokens")


def train(model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], batches: torch.Tensor, report: Report) -> None:
    """Plain steps of SGD, one for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for ids in batches:
        report.start()
        loss = loss_of(ids)
        loss.backward()
        report.step(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    report.end(model)


class Report:
    """Tells the parent process of each step, as a line of JSON."""

    def __init__(self, method: str, folder: Path) -> None:
        self.method, self.folder = method, folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._memory, self._begin = PeakMemory(self.device), 0.0

    def start(self) -> None:
        """A step begins: forward, backward, and no more."""
        self._memory.start()
        self._begin = time.perf_counter()

    def step(self, value: float) -> None:
        """It is over, with this loss (or what else is measured)."""
        self._tell(value=value, seconds=time.perf_counter() - self._begin, peak=self._memory.bytes())

    def end(self, model: torch.nn.Module) -> None:
        """How far the trained weights are from those of the first way, relative to their norm."""
        weights = {name: value.detach().cpu() for name, value in model.named_parameters() if value.requires_grad}
        path = self.folder / "weights.pt"
        if not path.exists():
            torch.save(weights, path)
        expected = torch.load(path)
        squares = sum(float((weights[name] - value).double().square().sum()) for name, value in expected.items())
        self._tell(difference=(squares / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5)

    def _tell(self, **event: float) -> None:
        print("\n" + json.dumps(event), flush=True)


def _all_ways(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Adds a row for each way as it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TextColumn("{task.fields[value]}"), console=Console(stderr=True)) as progress,
    ):
        for method in METHODS:
            rows.append(_one_way(method, Path(folder), options, progress))


def _one_way(method: str, folder: Path, options: argparse.Namespace, progress: Any) -> dict[str, Any]:
    bar = progress.add_task(METHODS[method], total=options.steps, value="starting")
    errors = folder / f"{method}.txt"
    command = [sys.executable, *sys.argv, "--work", method, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors.open("w"), text=True)
    try:
        events = list(_followed(process, bar, progress))
        code = process.wait()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        progress.update(bar, value="interrupted")
        raise
    if code:
        lines = [line for line in errors.read_text().splitlines() if line.strip()]
        raise SystemExit(f"{METHODS[method]} stopped: {lines[-1] if lines else 'no message'}")
    steps = [event for event in events if "value" in event]
    settled = steps[1:] or steps  # the first step also compiles
    return {
        "method": METHODS[method],
        "value": steps[-1]["value"],
        "weights_difference": events[-1]["difference"],
        "peak_bytes": max(step["peak"] for step in settled),
        "seconds_per_step": statistics.median(step["seconds"] for step in settled),
    }


def _followed(process: Any, bar: Any, progress: Any) -> Iterator[dict[str, float]]:
    """What the process tells, step by step."""
    for line in process.stdout:
        if not line.startswith('{"'):  # what a trainer prints
            continue
        event = json.loads(line)
        if "value" in event:
            progress.update(bar, advance=1, value=f"{event['value']:.4f}")
        yield event


def _print_table(rows: list[dict[str, Any]], measure: str, title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in (f"last {measure}", "weights differ by", "peak memory", "a step"):
        table.add_column(heading, justify="right")
    for row in rows:
        memory, seconds = f"{row['peak_bytes'] / 2**20:,.0f} MiB", f"{row['seconds_per_step']:.1f} s"
        table.add_row(row["method"], f"{row['value']:.6f}", f"{row['weights_difference']:.1e}", memory, seconds)
    Console(width=100).print(table)
