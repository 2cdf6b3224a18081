"""`--html FILE`: the same report as a file to look at in a browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streamfx.tools.report.paths import checked_path

if TYPE_CHECKING:
    from streamfx.tools.report.exports import Exports


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="also write the report to a file that a browser shows")


@contextmanager
def written_as_html(arguments: argparse.Namespace) -> Iterator[list[Exports]]:
    """Writes what is put into the list; a file that cannot be written is refused before anything is traced."""
    if arguments.html is not None:
        checked_path(arguments.html)
    made: list[Exports] = []
    yield made
    for report in made if arguments.html is not None else ():
        print(f"report written to {report.to_html(arguments.html)}", file=sys.stderr)
