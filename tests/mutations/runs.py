"""Puts mutations into a copy of the packages, one after the other, and runs the tests that have to see them."""

import multiprocessing
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutations.row import ROOT, Mutation

LIMIT = 400  # seconds that the tests of a row may take
TESTS_FAILED = 1  # pytest's exit status; others say that it could not run them
CAUGHT, NOT_CAUGHT, NO_PLACE, NO_RUN = "caught", "NOT caught", "place not found", "tests do not run"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row; `test` is the first test that failed, `output` the end of pytest's output."""

    row: Mutation
    found: str
    seconds: float = 0.0
    test: str = ""
    output: str = ""

    def __str__(self) -> str:
        by = f" by {self.test}" if self.test else ""
        return f"{self.found:<10} {self.row.kind}: {self.row.what}{by} ({self.seconds:.0f} s)"


class Copy:
    """A copy of the packages and their tests: the working tree is never changed."""

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

    def pytest(self, node_ids: Sequence[str], limit: float = LIMIT) -> tuple[int, str]:
        """Return the exit status and the output; stop at the first failure."""
        log = self.folder / "output"
        log.write_text("")  # remove the output of the last row
        process = _server().Process(target=_pytest, args=(self.folder, log, list(node_ids)))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return -1, f"no end after {limit:.0f} s"
        return process.exitcode or 0, log.read_text()

    def outcome(self, row: Mutation) -> Outcome:
        if len(row.places((self.folder / row.file).read_text())) != 1:
            return Outcome(row, NO_PLACE)
        begin = time.monotonic()
        with self.mutated(row):
            status, output = self.pytest(row.node_ids)
        failed = re.search(r"^FAILED tests/(.*?)(?: - |$)", output, re.M)
        test = failed[1] if failed and failed[1].startswith(row.tests) else ""
        found = NOT_CAUGHT if status == 0 else CAUGHT if status == TESTS_FAILED and test else NO_RUN
        return Outcome(row, found, time.monotonic() - begin, test, output[-3000:])


def _server() -> ForkServerContext:
    """Start processes that have imported slow packages, and nothing of this repository."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch._inductor.compile_fx", "pytest", "hypothesis", "sympy"])
    return context


def _pytest(folder: Path, log: Path, node_ids: list[str]) -> None:
    """Run pytest on the copy, which precedes the working tree on the path; called in a new process."""
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "streamfx")]:
        del sys.modules[name]
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(folder))
    import pytest

    status = pytest.main(["-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *node_ids])
    sys.exit(status)


@contextmanager
def copied() -> Iterator[Copy]:
    with TemporaryDirectory(prefix="mutations-") as folder:
        yield Copy(Path(folder).resolve())
