"""The command line of `benchmarks.gpu`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.checks import COMMANDS, Command
from benchmarks.gpu.command import run


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    command = COMMANDS[options.command]
    checks = [check for check in command.checks if not options.only or any(text in check.name for text in options.only)]
    if not checks:
        parser.error(f"--only {' '.join(options.only)} matches no check; there are: {'; '.join(_names(command))}")
    folder = options.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="streamfx-benchmark-"))
    return run(options.command, checks, options.seconds or command.seconds, folder, options.device, options.small)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Benchmarks for one GPU.")
    add = parser.add_argument
    add("command", choices=COMMANDS, help="; ".join(f"{name}: {command.about}" for name, command in COMMANDS.items()))
    add("--seconds", type=float, metavar="N", help="time budget (default: kernels 240, steps 420)")
    add("--out", type=Path, metavar="DIR", help="folder for the figures (default: $OUT, else a temporary folder)")
    add("--device", default="auto", help="cuda, cuda:1 or cpu (default: the GPU if there is one)")
    add("--small", action="store_true", help="tiny sizes, to see that the checks run; always so on a CPU")
    add("--only", nargs="+", default=[], metavar="TEXT", help="only checks whose name contains one of these texts")
    return parser


def _names(command: Command) -> list[str]:
    return [check.name for check in command.checks]


if __name__ == "__main__":
    sys.exit(main())
