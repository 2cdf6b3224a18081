"""Arguments that several commands share, validated before torch is imported, and the result of a command.

Exit codes, for programs:

0  done
1  refused: one message on standard error says what was asked, what was found, and what to do
2  the command line itself is wrong (argparse)
3  done, and the answer is no: `verify` found a difference, `explain --strict` an unchunked operator, `doctor` a fault
130  Ctrl-C
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from streamfx.errors import ModelError
from streamfx.tools.planner.model_names import TYPES, builtin_names, config_file
from streamfx.tools.report.paths import checked_path, is_there

REFUSED, WRONG_USAGE, NOT_SO, INTERRUPTED = 1, 2, 3, 130  # exit codes
TOKEN_UNITS = {"K": 1 << 10, "M": 1 << 20}
SEQ_HELP = "tokens per sequence, such as 4096 or 128K: K is 1,024, M is 1,048,576"
SOURCES = "a Hugging Face folder, its config.json, org/name in the local cache, a shipped name, or package.module:factory"
EXAMPLE = 'for example {"chunk_size": 1024}'


def add_model_arguments(parser: argparse.ArgumentParser, seq: int, dtype: str) -> None:
    """Add the arguments that select a model and its inputs."""
    shipped = ", ".join(builtin_names())
    parser.add_argument("model", help=f"{SOURCES}, a function that returns a model, or a model and its arguments ({shipped})")
    parser.add_argument("--seq", type=token_count, default=seq, metavar="TOKENS", help=f"{SEQ_HELP} (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per step (default: %(default)s)")
    parser.add_argument("--dtype", choices=[*TYPES, "float64"], default=dtype, help="dtype of parameters (default: %(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers of a Hugging Face model")
    parser.add_argument("--options", metavar="JSON", help="options of the backend, for example '{\"chunk_size\": 1024}'")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def token_count(text: str) -> int:
    """Return a number of tokens: a whole number, or a number with a suffix, K (1,024) or M (1,048,576).

    >>> token_count("4096"), token_count("128K"), token_count("1.5m")
    (4096, 131072, 1572864)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KM])", text.strip(), re.I)
    try:
        count = Fraction(match[1]) * TOKEN_UNITS[match[2].upper()] if match else Fraction(int(text))
    except ValueError:
        count = Fraction(1, 2)
    if count.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: give a whole number, or one such as 128K or 1M")
    return int(count)


def options_of(arguments: argparse.Namespace) -> Any:
    """Return the options for the backend, which validates them itself."""
    if arguments.options is None:
        return None
    try:
        return json.loads(arguments.options)
    except json.JSONDecodeError as error:
        raise ModelError("--options must be JSON", found=f"{arguments.options!r}: {error}", do=EXAMPLE) from None


def is_factory(model: str) -> bool:
    """Return whether a name refers to a user's function that builds a model: `package.module:factory`."""
    return ":" in model and not is_there(Path(model))


def check_model(arguments: argparse.Namespace) -> None:
    """Raise an error for an unknown model name before any slow work begins."""
    if not is_factory(arguments.model):
        config_file(arguments.model)


class CommandResult(NamedTuple):
    """The text to print, and the exit code."""

    text: str
    code: int = 0


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="also write the report as an HTML file")


@contextmanager
def written_as_html(arguments: argparse.Namespace) -> Iterator[list[Any]]:
    """Write the report appended to the yielded list; a path that cannot be written is refused before any tracing.

    Two reports are compared on one page.
    """
    if arguments.html is not None:
        checked_path(arguments.html)
    reports: list[Any] = []  # explanations and plans, or a table
    yield reports
    if arguments.html is not None:
        report, *others = reports
        print(f"report written to {report.to_html(arguments.html, *others)}", file=sys.stderr)
