"""The command `streamfx`: one subcommand per file, each with `add(subparsers)` and `run(arguments)`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from streamfx.errors import StreamFXError, told
from streamfx.frontend.gc_pause import uncollected
from streamfx.tools.cli import doctor, explain, plan, verify
from streamfx.tools.cli.codes import INTERRUPTED, REFUSED, CommandResult

CODES = "exit codes: 0 done, 1 refused (one message says why), 2 wrong usage, 3 the answer is no, 130 Ctrl-C"
COMMANDS = (explain, verify, plan, doctor)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="streamfx", description="Train decoders on long sequences: look before you run.", epilog=CODES
    )
    subparsers = made.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(subparsers).set_defaults(run=command.run)
    return made


def command() -> int:
    """`main` as a process of its own."""
    with uncollected():
        code = main()
        gc.freeze()  # the process ends: nobody needs the cycles in what was traced to be looked for
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; refusals go to standard error, without a traceback. Exit codes: `codes.py`."""
    given = parser().parse_args(arguments)
    try:
        answer = given.run(given)
    except StreamFXError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    text, code = answer if isinstance(answer, CommandResult) else (answer, 0)
    return code if _show(text) else REFUSED


def _show(text: str) -> bool:
    """Whether the text could be written, or nobody wants to read more of it."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written when Python ends
        if not isinstance(error, BrokenPipeError):  # who reads has seen enough: `streamfx explain ... | head`
            do = "give a place with room: streamfx ... > FILE"
            print(StreamFXError("the answer is to be written to standard output", found=told(error), do=do), file=sys.stderr)
            return False
    return True
