"""Run benchmarks, print their tables in markdown, and keep the figures as JSON and as a chart if asked."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.settings import Rows, Settings
from benchmarks.suites import SUITES
from benchmarks.tables import markdown
from benchmarks.ways import WAYS


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    for kind, names, known in (("benchmark", options.suites, SUITES), ("way", options.way, WAYS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no {kind} is called {unknown[0]!r}; there are {'; '.join(known)}")
    figures: dict[str, Any] = merged(options.figures) if options.figures else {"machine": machine(options.device)}
    print(f"{figures['machine']}\n")
    for name in _names(options, figures):
        if not options.figures:
            figures[name] = run(name, _settings(options))
        print(f"## {name}\n\n{_paragraph(name)}\n\n{markdown(figures[name])}\n", flush=True)
        if options.json:  # after each suite: a run may be stopped
            options.json.write_text(json.dumps(figures, indent=1))
    if options.chart:
        from benchmarks.chart import draw

        draw(figures, options.chart)


def merged(files: list[Path]) -> dict[str, Any]:
    """The figures of several runs: rows of one suite one after another."""
    figures: dict[str, Any] = {}
    for file in files:
        for name, found in json.loads(file.read_text()).items():
            figures[name] = [*figures.get(name, []), *found] if isinstance(found, list) else found
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("suites", nargs="*", help=f"which ({', '.join(SUITES)}); default: all")
    add("--quick", action="store_true", help="the short form")
    add("--length", type=int, nargs="+", default=[], metavar="T", help="tokens per sequence")
    add("--chunk-size", type=int, nargs="+", default=[], metavar="N", help="rows per chunk, beside the planner's choice")
    add("--rounds", type=int, metavar="N", help="how often ways take turns")
    add("--way", nargs="+", default=[], metavar="WAY", help=f"which ways: {'; '.join(WAYS)}")
    add("--model", default="small", help="of step, masks, longest, operations: 'small', or what `streamfx plan` takes (Qwen3-8B)")
    add("--layers", type=int, metavar="N", help="as many layers of it")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32, on a GPU bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: the GPU if there is one")
    add("--cap", type=int, metavar="MIB", help="of longest: what a step may take")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add("--chart", type=Path, metavar="FILE", help="draw them (svg or png)")
    add("--figures", type=Path, nargs="+", metavar="FILE", help="run nothing: print and draw figures that --json wrote")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        quick=options.quick,
        lengths=tuple(options.length),
        chunk_sizes=tuple(options.chunk_size),
        rounds=options.rounds,
        ways=tuple(options.way),
        model=options.model,
        layers=options.layers,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"),
        device=options.device,
        cap=options.cap,
    )


def _names(options: argparse.Namespace, figures: dict[str, Any]) -> list[str]:
    """The suites that were asked for; by default all, or all that there are figures of."""
    return [name for name in options.suites or SUITES if not options.figures or name in figures]


def _paragraph(name: str) -> str:
    return "\n".join(line.strip() for line in (SUITES[name].__doc__ or "").splitlines())


def machine(device: str) -> str:
    cores, threads = os.cpu_count(), torch.get_num_threads()
    python = platform.python_version()
    gpu = [torch.cuda.get_device_name(device)] if device.startswith("cuda") else []
    return ", ".join(
        [*gpu, f"torch {torch.__version__}", f"Python {python}", f"{cores} cores", f"{threads} threads", sys.platform]
    )


def run(name: str, settings: Settings) -> Rows:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name)
        return SUITES[name](replace(settings, tell=lambda text: progress.update(task, description=f"{name}: {text}")))


if __name__ == "__main__":
    main()
