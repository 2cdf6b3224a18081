"""The option `--html FILE`: write the report to a file for a browser."""

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
    parser.add_argument("--html", metavar="FILE", help="also write the report as an HTML file")


@contextmanager
def written_as_html(arguments: argparse.Namespace) -> Iterator[list[Exports]]:
    """Write the reports appended to the yielded list; a path that cannot be written is refused before any tracing."""
    if arguments.html is not None:
        checked_path(arguments.html)
    reports: list[Exports] = []
    yield reports
    for report in reports if arguments.html is not None else ():
        print(f"report written to {report.to_html(arguments.html)}", file=sys.stderr)
