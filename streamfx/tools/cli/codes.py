"""The result of a command: a text, and an exit code for programs.

0  done
1  refused: one message on standard error says what was asked, what was found, and what to do
2  the command line itself is wrong (argparse)
3  done, and the answer is no: `verify` found a difference, `explain --strict` an unchunked operator, `doctor` a fault
130  Ctrl-C
"""

from __future__ import annotations

from typing import NamedTuple

REFUSED, NOT_SO, INTERRUPTED = 1, 3, 130


class CommandResult(NamedTuple):
    """The text to print, and the exit code."""

    text: str
    code: int = 0
