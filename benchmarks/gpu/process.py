"""A worker process as the command sees it: it is asked for checks, answers in lines of JSON, and is ended with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LAST_LINES, WIDTH = 6, 240  # of what a process wrote to its standard error


class WorkerEndedError(RuntimeError):
    """The worker ended without an answer."""


class WorkerTimeoutError(RuntimeError):
    """The worker has not answered in time."""


class Worker:
    """A process in a process group of its own. `errors` is the file that its standard error goes to."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put("")  # the end

    def ask(self, question: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` will find that it has ended
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            WorkerTimeoutError: none came in so many seconds.
            WorkerEndedError: the process has ended; the message holds the last lines of its standard error.
        """
        try:
            line = self._answers.get(timeout=max(seconds, 0))
        except queue.Empty:
            raise WorkerTimeoutError from None
        if not line:
            raise WorkerEndedError(f"ended with code {self._process.wait()}: {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        """The last lines of its standard error, in one; the last that speaks of an error comes first."""
        lines = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        error = [line for line in lines if "rror" in line][-1:]
        return " | ".join(line[:WIDTH] for line in [*error, *lines[-LAST_LINES:]]) or "it wrote nothing to its standard error"

    def kill(self) -> None:
        """End it and all processes that it started: compilers' workers live on otherwise, and keep memory of the GPU."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
