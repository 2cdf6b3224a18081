"""A row of the list: a fault, put back into the code by hand, and the tests that have to see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """`before` stands once in a file of the repository; with `after` in its place one of the tests has to fail.

    `kind` is a key of `KINDS`, `file` counts from the root of the repository. The tests are node ids of default tests, without
    their folder.
    """

    kind: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def node_ids(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests]

    def count(self, text: str) -> int:
        """How often a file has what stands there."""
        return text.count(self.before)

    def put_into(self, text: str) -> str:
        assert self.count(text) == 1, f"{self.what}: {self.before!r} stands {self.count(text)} times in {self.file}"
        return text.replace(self.before, self.after)
