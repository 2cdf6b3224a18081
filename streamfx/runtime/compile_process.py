"""A process that compiles segments of loop bodies into Inductor's cache, while this process runs them eagerly.

The process (`frontend/compile_worker.py`) serves jobs (`BodyJob`) that it reads from a pipe, and sends one answer for each.
The parent never waits for it and needs no thread: it asks for answers between two steps. The process ends if all jobs are
answered, if the parent ends in any way (it reads the end of the pipe), and if the parent exits normally. A forked copy of the
parent closes its copies of the pipes.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from streamfx.runtime.body_jobs import BodyJob
from streamfx.torch_private.inductor_cache import environment_of_compiler

Outcome = Literal["cached", "unknown operator", "failed", "idle"]
# `-c` adds the working directory as the first place to import from, where a file could replace a module of the library
PROGRAM = "import sys; sys.path[:1] = [path for path in sys.path[:1] if path]; "
PROGRAM += "from streamfx.frontend.compile_worker import serve; serve({}, {})"


@dataclass(frozen=True)
class Answer:
    """The outcome of a job, and the text of its error; "idle", without a job: the process has ended for lack of jobs."""

    key: str
    outcome: Outcome
    error: str = ""


class CompileProcess:
    """The process, as its parent uses it: `submit` and `receive` never wait. `is_alive` is False after it has ended."""

    def __init__(self) -> None:
        """Start the process; an OSError if that is impossible."""
        (fd_in, self._fd_jobs), (fd_answers, fd_out) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", PROGRAM.format(fd_in, fd_out)]
        environment = {**environment_of_compiler(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=(fd_in, fd_out),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            os.close(self._fd_jobs)
            os.close(fd_answers)
            raise
        finally:
            os.close(fd_in)
            os.close(fd_out)
        os.set_blocking(self._fd_jobs, False)
        self._answers = Connection(fd_answers, writable=False)
        self._unsent, self._owner, self.is_alive = b"", os.getpid(), True

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def submit(self, job: BodyJob) -> None:
        """Queue a job; `receive` sends it."""
        data = pickle.dumps((job.key, job.encoded))
        self._unsent += struct.pack("!i", len(data)) + data  # the format of `Connection.recv`

    def receive(self) -> Iterator[Answer]:
        """Yield the answers that have arrived, and send jobs as far as the pipe takes them.

        Answers first: the process may have ended for lack of jobs, and says so, before it could read these.
        """
        try:
            while self.is_alive and self._answers.poll(0):
                yield self._answers.recv()
            with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full, or the next call receives the last answer
                while self.is_alive and self._unsent:
                    self._unsent = self._unsent[os.write(self._fd_jobs, self._unsent) :]
        except (EOFError, OSError):
            self.close()

    def close(self) -> None:
        """End the process, and all compilers that it has started."""
        if self.is_alive and self._owner == os.getpid():
            self.forget()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def forget(self) -> None:
        """Close this process's ends of the pipes. A forked process must: otherwise the other one misses the end of its parent."""
        if self.is_alive:
            self.is_alive = False
            os.close(self._fd_jobs)
            self._answers.close()
            if self._owner != os.getpid():
                self._process.returncode = 0  # not a process that a fork of its parent can wait for


class JobQueue:
    """The jobs of all programs in this process, and the process that compiles them, which runs only while there are jobs."""

    def __init__(self) -> None:
        """Start without jobs and without a process."""
        self.process: CompileProcess | None = None
        self.answers: dict[str, Answer] = {}  # by key of the job
        self.is_broken = False  # the process ended before it had answered all jobs: no other one is started
        self.reason = ""  # why it is broken
        self._unanswered: set[str] = set()

    def submit(self, job: BodyJob) -> None:
        """Queue a job, unless it is queued, answered, or in the cache; start the process if none runs."""
        if self.is_broken or job.key in self._unanswered or job.key in self.answers:
            return
        if job.is_in_cache():
            self.answers[job.key] = Answer(job.key, "cached")
            return
        if self.process is None:
            try:
                self.process = self.start_process()
            except OSError as error:
                self.is_broken, self.reason = True, str(error)
                return
        self._unanswered.add(job.key)
        self.process.submit(job)

    def poll(self) -> None:
        """Receive answers without waiting. If all jobs are answered, end the process, which frees its memory."""
        process = self.process
        if process is None:
            return
        for answer in process.receive():
            if answer.outcome == "idle":  # jobs that it did not read are submitted again
                self._unanswered.clear()
                break
            self.answers[answer.key] = answer
            self._unanswered.discard(answer.key)
        if not self._unanswered or not process.is_alive:
            is_broken = bool(self._unanswered)
            self._unanswered.clear()
            self.close()
            if is_broken:
                self.is_broken, self.reason = True, f"exit status {process.returncode}"

    def close(self) -> None:
        """End the process, if one runs."""
        process, self.process = self.process, None
        if process is not None:
            process.close()

    def forget(self) -> None:
        """In a forked process: drop the jobs of the parent, whose process answers only the parent."""
        process, self.process = self.process, None
        self._unanswered.clear()
        if process is not None:
            process.forget()

    @staticmethod
    def start_process() -> CompileProcess:
        """Start the process; tests replace this."""
        return CompileProcess()


job_queue = JobQueue()
atexit.register(lambda: job_queue.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: job_queue.forget())
