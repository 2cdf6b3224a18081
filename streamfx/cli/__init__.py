"""The command `streamfx`: one subcommand per file, each with `add(subparsers)` and `run(arguments)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from streamfx.cli import plan
from streamfx.errors import StreamFXError

COMMANDS = (plan,)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="streamfx", description="Train decoders on long sequences: look before you run.")
    subparsers = made.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(subparsers).set_defaults(run=command.run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; refusals go to standard error, without a traceback."""
    given = parser().parse_args(arguments)
    try:
        print(given.run(given))
    except StreamFXError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
