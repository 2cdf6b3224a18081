"""A row of the list: a known fault, and the tests that have to catch it.

The rows are in `rows/`, one text per subject:

    @ passes/rewrite/views/concat.py | joins | test_joined_parts.py::test_parts
    rows of all parts are asked for
    - begin < part.end
    + True

A head names a file, a kind, and tests for the rows that follow. A row has words, a fragment of code, and its replacement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "rows"


@dataclass(frozen=True)
class Mutation:
    """`before` occurs once in a file of the repository; if `after` replaces it, one of the tests has to fail.

    `kind` is a key of `KINDS`, `file` counts from the root of the repository. The tests are node ids of default tests, without
    their folder.
    """

    kind: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @staticmethod
    def all() -> Iterator[Mutation]:
        for path in sorted(FOLDER.glob("*.txt")):
            yield from read(path.read_text())

    @property
    def node_ids(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests]

    def places(self, text: str) -> list[int]:
        """Return where a file has the fragment, which begins and ends between words."""
        pattern = r"(?<!\w)" * self.before[0].isidentifier() + re.escape(self.before) + r"(?!\w)" * self.before[-1].isidentifier()
        return [match.start() for match in re.finditer(pattern, text)]

    def put_into(self, text: str) -> str:
        places = self.places(text)
        assert len(places) == 1, f"{self.what}: {self.file} has {self.before!r} {len(places)} times"
        return text[: places[0]] + self.after + text[places[0] + len(self.before) :]


def read(text: str) -> Iterator[Mutation]:
    """The rows of a text.

    >>> list(read("@ a.py | sums | test_a.py::test_sum\\na sum\\n- x + y\\n+ x\\n"))
    [Mutation(kind='sums', what='a sum', file='a.py', before='x + y', after='x', tests=('test_a.py::test_sum',))]
    """
    entries: list[tuple[list[str], str, dict[str, list[str]]]] = []
    head: list[str] = []
    for line in text.splitlines():
        match line[:1]:
            case "@":
                head = line[2:].split(" | ")
            case "-" | "+":
                entries[-1][2][line[0]].append(line[2:])
            case mark if mark and mark != "#":
                entries.append((head, line, {"-": [], "+": []}))
    for (file, kind, *tests), what, lines in entries:
        yield Mutation(kind, what, file, "\n".join(lines["-"]), "\n".join(lines["+"]), tuple(tests))
