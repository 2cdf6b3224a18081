"""The measuring processes, seen from the one that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any


class Failed(RuntimeError):
    """A measuring process ended without an answer."""


class Measured:
    """A way of training in a process of its own, with an empty cache of compiled code; ask it what `Training` answers."""

    def __init__(self, way: str, length: int, **spec: Any) -> None:
        self.way = way
        self._cache = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed on exit)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps({"way": way, "length": length, **spec})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": self._cache.name},
        )

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()
        self._cache.cleanup()

    def ask(self, question: str) -> dict[str, Any]:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        try:
            questions.write(question + "\n")
            questions.flush()
        except BrokenPipeError:
            pass  # what it said is read below
        line = answers.readline()
        if line:
            return json.loads(line)
        self._errors.seek(0)
        message = self._errors.read().strip().splitlines() or [f"it ended with code {self._process.wait()}"]
        raise Failed(f"{self.way}, {question}: {message[-1]}")
