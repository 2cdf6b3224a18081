"""Run checks within a time budget. Imports no torch, so that a fault of a worker cannot end it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Check
from benchmarks.gpu.process import Worker, WorkerEndedError, WorkerTimeoutError
from benchmarks.gpu.table import closing

ROOT = Path(__file__).parents[2]
CLOSING = 2.0  # seconds that are kept for ending a worker and printing the table
START = (20.0, 12.0)  # seconds that a worker takes until it answers: on a machine with a GPU, and small
PATIENCE = (3.0, 30.0)  # a check is ended after so many times its expected seconds: on a machine with a GPU, and small
FAILED = ("failed", "stopped")
GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one of these is there if there is a GPU
FEW = 4  # checks for which a second worker on a CPU does not pay


class Journal:
    """Records that are printed and written to a file as soon as they exist."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path, self.records = path, list[dict[str, Any]]()
        self._clock, self._start, self._lock = clock, clock(), threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        with self._lock, self.path.open("a") as file:
            self.records.append({**record, "at": round(self._clock() - self._start, 1)})
            line = json.dumps(self.records[-1])
            print(line, flush=True)
            file.write(line + "\n")


class Schedule:
    """Runs checks in order, as long as the time that each is expected to take is left.

    If earlier checks took longer than expected, so are later ones to: a slow machine starts none that it cannot end.
    """

    def __init__(
        self, seconds: float, small: bool, journal: Journal, start: Callable[[], Worker], clock: Callable[[], float]
    ) -> None:
        self.small, self._journal, self._start, self._clock = small, journal, start, clock
        self._deadline = clock() + seconds - CLOSING
        self._worker: Worker | None = None
        self._took = self._expected = 0.0
        self._starts = True  # the last worker that was started has answered
        self._stopped = False

    def left(self) -> float:
        return self._deadline - self._clock()

    def run(self, waiting: deque[Check]) -> None:
        """Run checks that wait, until none is left; several schedules may share them."""
        try:
            while waiting and not self._stopped:
                with contextlib.suppress(IndexError):  # another schedule has taken the last one
                    self._run(waiting.popleft())
        finally:
            self._end_worker()

    def stop(self) -> None:
        """End the worker, whatever it does, and run nothing more; called by another thread."""
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.kill()

    def _run(self, check: Check) -> None:
        pace = self._took / self._expected if self._expected else 1.0
        needed = check.expected(self.small) * max(1.0, pace)
        needed += 0.0 if self._worker is not None else START[self.small]
        if self._starts and needed > self.left():
            why = f"expected {needed:.0f} s, {max(self.left(), 0):.0f} s left"
        elif not self._starts:
            why = "no worker starts"
        else:
            self._run_check(check)
            return
        self._journal.write({"check": check.name, "status": "left out", "why": why})

    def _run_check(self, check: Check) -> None:
        status, why, began = "done", {}, self._clock()
        try:
            worker = self._ready_worker()
            began = self._clock()
            for answer in self._answers(worker, check):
                self._journal.write(answer)
        except _CheckError as error:
            status, why = error.status, {"why": str(error)}
        took = self._clock() - began
        if self._stopped:
            return
        if status == "done":
            self._took, self._expected = self._took + took, self._expected + check.expected(self.small)
        self._journal.write({"check": check.name, "status": status, "seconds": round(took, 1), **why})

    def _ready_worker(self) -> Worker:
        """The worker, which is started if there is none; its first answer says which device it runs on."""
        if self._worker is None:
            self._worker, self._starts = self._start(), False
            if self._stopped:  # meanwhile
                raise _CheckError("stopped", "interrupted")
            ready = self._answer(self._worker, self._clock() + PATIENCE[self.small] * START[self.small])
            self._starts, self.small = True, ready.pop("small")
            self._journal.write({"status": "worker", **ready})
        return self._worker

    def _answers(self, worker: Worker, check: Check) -> Iterator[dict[str, Any]]:
        """The findings of a check until it ends."""
        limit = self._clock() + PATIENCE[self.small] * check.expected(self.small)
        worker.ask({"check": check.name})
        while "end" not in (answer := self._answer(worker, limit)):
            yield answer
        if answer["retire"]:  # it cannot run another check: the device is unusable, or memory was not given back
            self._journal.write({"check": check.name, "status": "worker retired", "why": answer["retire"]})
            self._end_worker()
        if answer["end"]:
            raise _CheckError("failed", answer["end"])

    def _answer(self, worker: Worker, limit: float) -> dict[str, Any]:
        try:
            return worker.answer(min(limit, self._deadline) - self._clock())
        except WorkerTimeoutError:
            at_end = " (no time is left)" if self._deadline <= limit else ""
            why = f"no answer in time{at_end}: {worker.last_words()}"
            self._end_worker()
            raise _CheckError("stopped", why) from None
        except WorkerEndedError as error:
            self._end_worker()
            raise _CheckError("failed", str(error)) from None

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class _CheckError(Exception):
    """A check that did not end well; `status` is "failed" or "stopped"."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


def run(name: str, checks: Sequence[Check], seconds: float, folder: Path, device: str, small: bool) -> int:
    """Run checks of one command, and print a table at the end.

    Returns:
        0, or 1 if a check failed, was stopped, or found numbers that are off. A check that was left out, and a step that does not
        fit, are no failures.
    """
    clock, numbers = time.monotonic, itertools.count()
    device = "cpu" if device == "auto" and not any(map(os.path.exists, GPUS)) else device
    small = small or device == "cpu"
    lanes = 1 + (device == "cpu" and len(checks) > FEW)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl", clock)
    own = environment(shared_cache(), lanes)
    journal.write({"file": str(journal.path), "command": name, "seconds": seconds, "cache": own["TORCHINDUCTOR_CACHE_DIR"]})
    command = [sys.executable, "-m", "benchmarks.gpu.worker", name, device, "small" if small else "auto"]

    def start() -> Worker:
        return Worker(command, own, folder / f"{name}-worker-{next(numbers)}.stderr")

    run_all([Schedule(seconds, small, journal, start, clock) for _ in range(lanes)], checks, journal)
    print("\n".join(closing(journal.records)), flush=True)
    return int(any(record.get("status") in FAILED or record.get("off") for record in journal.records))


def run_all(schedules: Sequence[Schedule], checks: Sequence[Check], journal: Journal) -> None:
    """Run checks by several schedules at once, each with a worker of its own, until all have ended or somebody interrupts."""
    waiting = deque(checks)
    with terminated_as_interrupt(), ThreadPoolExecutor(len(schedules)) as pool:
        try:
            for future in [pool.submit(schedule.run, waiting) for schedule in schedules]:
                future.result()
        except KeyboardInterrupt:
            for schedule in schedules:
                schedule.stop()
            journal.write({"status": "stopped", "check": "all that is left", "why": "interrupted"})


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as an interrupt: workers are ended and the table is printed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def environment(cache: Path, lanes: int) -> dict[str, str]:
    """A worker's: one cache of compiled code for all workers of both commands, and memory segments that grow, not fragment."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",  # nothing is fetched, and no time is lost trying
        "KINETO_LOG_LEVEL": "99",  # the profiler's lines for each start and stop would hide the last lines of a failure
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_NUM_THREADS": "1"} if lanes > 1 else {}),
    }
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def shared_cache() -> Path:
    """A folder of this user alone for compiled code, the same for every run."""
    folder = Path(tempfile.gettempdir()) / f"streamfx-benchmark-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # another user's, whose code would be run
        return Path(tempfile.mkdtemp(prefix="streamfx-benchmark-cache-"))
    return folder
