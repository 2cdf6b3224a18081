"""The process that compiles segments of loop bodies into Inductor's cache; `runtime/compile_process.py` starts it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from streamfx.frontend import backend  # noqa: F401  (registers all operators of the library)
from streamfx.runtime.body_jobs import UnknownOperatorError, decode_job
from streamfx.runtime.compile_process import Answer
from streamfx.runtime.inductor_errors import blame
from streamfx.torch_private.inductor_cache import use_settings

IDLE_SECONDS = 20.0  # without a job, after which the process ends: the parent may train no more
MAX_TEXT = 500  # characters of an error: an answer fits into one write to the pipe, so that it arrives as a whole


def serve(fd_in: int, fd_out: int) -> None:
    """Run the process: answer the jobs of the pipe `fd_in` on the pipe `fd_out`.

    The process ends if the parent closes its ends, or if no job has arrived for `IDLE_SECONDS`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end then ends this process
    jobs: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(fd_in, jobs), daemon=True).start()
    with Connection(fd_out, readable=False) as answers:
        with suppress(queue.Empty):
            while True:
                answers.send(_answer(*jobs.get(timeout=IDLE_SECONDS)))
        answers.send(Answer("", "idle"))
    os._exit(0)


def _read_jobs(fd_in: int, jobs: queue.SimpleQueue[tuple[str, bytes]]) -> None:
    """Queue the jobs of the parent. If the parent ends, kill this process and the compilers that it has started."""
    try:
        with Connection(fd_in, writable=False) as pipe:
            while True:
                jobs.put(pipe.recv())
    finally:
        os.killpg(0, signal.SIGKILL)  # the process is the leader of a group that contains no other process


def _answer(key: str, encoded: bytes) -> Answer:
    """Compile a job into Inductor's cache, and return the answer."""
    try:
        job = decode_job(encoded)
        with use_settings(job.settings):
            job.compile()
            job.mark_as_cached()
    except UnknownOperatorError as error:
        return Answer(key, "unknown operator", str(error)[:MAX_TEXT])
    except Exception as error:
        return Answer(key, "failed", blame(error)[:MAX_TEXT])
    return Answer(key, "cached")
