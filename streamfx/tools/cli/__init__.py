"""The command `streamfx`: one subcommand per file, each with `add(subparsers)` and `run(arguments)`.

This package parses arguments, loads models, and prints the answers of `streamfx.tools.inspect` and `streamfx.tools.planner`.
It is the top layer: it may import every other package, and no package imports it. It rejects wrong arguments before it
imports torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from streamfx import __version__
from streamfx.errors import StreamFXError, describe_error
from streamfx.frontend.gc_pause import pause_gc
from streamfx.progress import periodic_lines
from streamfx.tools.cli import compare_command, doctor, explain_command, plan_command, verify_command
from streamfx.tools.cli.arguments import INTERRUPTED, REFUSED, WRONG_USAGE, CommandResult

CODES = "exit codes: 0 done, 1 refused (with an error message), 2 wrong usage, 3 the answer is no, 130 Ctrl-C"
COMMANDS = (explain_command, verify_command, compare_command, plan_command, doctor)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser with all subcommands."""
    arguments_parser = argparse.ArgumentParser(
        prog="streamfx", description="Train decoders on long sequences: inspect a step before you run it.", epilog=CODES
    )
    arguments_parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = arguments_parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add(subparsers).set_defaults(run=command.run)
    return arguments_parser


def command() -> int:
    """Run `main` as the only work of this process, and return its exit code."""
    with pause_gc():
        code = main()
        gc.freeze()  # the process is about to end, so do not search the traced objects for cycles
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code (see `arguments.py`); refusals go to standard error, without a traceback."""
    parsed = parser().parse_args(arguments)
    if parsed.command is None:  # as ruff and hf do: help, and the exit code of wrong usage
        parser().print_help(sys.stderr)
        return WRONG_USAGE
    try:
        with periodic_lines():
            try:
                answer = parsed.run(parsed)
            except StreamFXError as error:
                print(error, file=sys.stderr)  # that of a plan looks for a change that fits, which may take minutes
                return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    text, code = answer if isinstance(answer, CommandResult) else (answer, 0)
    return code if _print(text) else REFUSED


def _print(text: str) -> bool:
    """Print a text. Return False if it could not be written; a reader that closes the pipe is no error."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the buffer that Python flushes at exit
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe: `streamfx explain ... | head`
            do = "write to a file on a disk with free space: streamfx ... > FILE"
            print(
                StreamFXError("cannot write the report to standard output", found=describe_error(error), do=do),
                file=sys.stderr,
            )
            return False
    return True
