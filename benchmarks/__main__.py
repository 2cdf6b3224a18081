"""Run benchmarks, print their tables in markdown, and keep the figures as JSON if asked."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.suites import SUITES, Rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"which ({', '.join(SUITES)}); default: all")
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(SUITES)}")
    figures: dict[str, Any] = {"machine": machine()}
    print(f"{figures['machine']}\n")
    for name in options.suites or SUITES:
        figures[name] = run(name, options.quick)
        print(f"## {name}\n\n{SUITES[name].__doc__}\n\n{markdown(figures[name])}\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def machine() -> str:
    cores, threads = os.cpu_count(), torch.get_num_threads()
    python = platform.python_version()
    return f"torch {torch.__version__}, Python {python}, {cores} cores, {threads} threads, {sys.platform}"


def run(name: str, quick: bool) -> Rows:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name)
        return SUITES[name](quick, lambda text: progress.update(task, description=f"{name}: {text}"))


def markdown(rows: Rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"


if __name__ == "__main__":
    main()
