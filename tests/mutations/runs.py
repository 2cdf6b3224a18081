"""Puts mutations into a copy of the packages, one after the other, and runs the tests that have to see them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutations.row import ROOT, Mutation

LIMIT = 400  # seconds that the tests of a row may take
TESTS_FAILED = 1  # pytest's exit status; others say that it could not run them
CAUGHT, NOT_CAUGHT, NO_PLACE, NO_RUN = "caught", "NOT caught", "place not found", "tests do not run"


@dataclass(frozen=True)
class Outcome:
    """What became of a row; `test` is the first test that failed, `output` the end of what pytest said."""

    row: Mutation
    found: str
    seconds: float = 0.0
    test: str = ""
    output: str = ""

    def __str__(self) -> str:
        by = f" by {self.test}" if self.test else ""
        return f"{self.found:<10} {self.row.kind}: {self.row.what}{by} ({self.seconds:.0f} s)"


class Copy:
    """The packages and their tests in a folder of their own: the working tree is never changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ("streamfx", "passes", "tests"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=unwanted)
        shutil.copy(ROOT / "pyproject.toml", folder)
        if not (folder / "streamfx" / "passes").is_symlink():  # an unpacked source distribution has the files twice
            shutil.rmtree(folder / "streamfx" / "passes")
            (folder / "streamfx" / "passes").symlink_to("../passes")

    @contextmanager
    def mutated(self, row: Mutation) -> Iterator[None]:
        path = self.folder / row.file
        text = path.read_text()
        path.write_text(row.put_into(text))
        try:
            yield
        finally:
            path.write_text(text)

    def pytest(self, node_ids: Iterable[str], limit: float = LIMIT) -> tuple[int, str]:
        """The exit status, and what was said; stops at the first failure."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *node_ids]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, f"no end after {limit:.0f} s"
        return done.returncode, done.stdout + done.stderr

    def outcome(self, row: Mutation) -> Outcome:
        if row.count((self.folder / row.file).read_text()) != 1:
            return Outcome(row, NO_PLACE)
        begin = time.monotonic()
        with self.mutated(row):
            status, output = self.pytest(row.node_ids)
        found = CAUGHT if status == TESTS_FAILED else NOT_CAUGHT if status == 0 else NO_RUN
        failed = re.search(r"^FAILED tests/(.*?)(?: - |$)", output, re.M)
        return Outcome(row, found, time.monotonic() - begin, failed[1] if failed else "", output[-3000:])


@contextmanager
def copied() -> Iterator[Copy]:
    with TemporaryDirectory(prefix="mutations-") as folder:
        yield Copy(Path(folder).resolve())
