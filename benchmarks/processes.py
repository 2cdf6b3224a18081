"""The measuring processes, seen from the one that asks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any


class Measured:
    """A way of training in a process of its own; ask it `measured`, `live`, `flops` or `compile`."""

    def __init__(self, method: str, length: int, sizes: dict[str, int] | None = None, **options: Any) -> None:
        spec = {"method": method, "length": length, "sizes": sizes or {}, "options": options}
        self.method = method
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed on exit)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def ask(self, question: str) -> dict[str, Any]:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(question + "\n")
        questions.flush()
        line = answers.readline()
        if line:
            return json.loads(line)
        self._errors.seek(0)
        message = self._errors.read().strip().splitlines() or [f"it ended with code {self._process.wait()}"]
        raise RuntimeError(f"{self.method}, {question}: {message[-1]}")
