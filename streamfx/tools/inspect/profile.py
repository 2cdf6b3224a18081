"""`streamfx.profile`: measure the memory and time of a step, loop by loop.

Bytes come from torch's profiler, of which only one can be active; loops call a *probe* that records their begin and end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from streamfx.argument_checks import check_call
from streamfx.errors import ProfileError
from streamfx.frontend.unpicklable import Unpicklable
from streamfx.runtime.probes import LoopOrigin, measurement
from streamfx.tools.report.notices import CostedProgram
from streamfx.tools.report.paths import checked_path, written
from streamfx.tools.report.profile_text import MeasuredStep, as_plain, measured, table_of
from streamfx.tools.report.timeline import Timeline, trace_of
from streamfx.torch_private.allocations import allocations, is_profiled
from streamfx.torch_private.dynamo import record_compilations

_profiler_lock = threading.Lock()  # held during a measurement


OTHER_PROFILER = (
    "another torch profiler was opened in the block and replaced this one: only one can be active. Remove it from the block, or "
    "measure after it"
)
OTHER_THREAD = (
    "the step ran in another thread than the one that entered the block; torch's profiler sees only that thread and those of "
    "autograd. Enter the block in the thread that runs the step"
)


class Profile(Unpicklable):
    """A measurement by `streamfx.profile`. It prints as a table, and is complete once its block is left.

    Raises:
        ProfileError: it is read before that, or asked for bytes that were not recorded.

    Example:
        >>> import torch, streamfx
        >>> with streamfx.profile() as profile:
        ...     x = torch.randn(64, 64).square()
        >>> profile.peak_bytes >= 64 * 64 * 4
        True
    """

    _keep = "keep summary(), which is a dictionary, or the trace that to_perfetto(path) writes"

    def __init__(self) -> None:
        """Start without a measurement; `_why_unmeasured` is the reason that an error gives."""
        self._step: MeasuredStep | None = None
        self._graphs: list[CostedProgram | None] = []
        self._why_unmeasured = "its block was not entered"
        self._measuring: AbstractContextManager[None] | None = None

    def __enter__(self) -> Profile:
        """Start the measurement; a profile can be entered once."""
        if self._measuring is not None:
            raise ProfileError("cannot measure a step", found="a profile that was already used", do="create another: profile()")
        context = self._measure()
        context.__enter__()
        self._measuring, self._why_unmeasured = context, "its block is still running, or has ended with an error"
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._measuring is not None:
            self._measuring.__exit__(*exception)

    @contextmanager
    def _measure(self) -> Iterator[None]:
        """Record allocations, loops and compilations until the block ends, then store the measured step."""
        _acquire_profiler()
        try:
            watch = _Watch()
            with record_compilations() as compiled, allocations() as allocated:
                measurement.probe, begin = watch, watch.now()
                try:
                    yield
                finally:
                    measurement.probe, end = None, watch.now()
            unseen = OTHER_THREAD if watch.ran_in_other_thread else ""
            if not allocated.is_complete:
                unseen = OTHER_PROFILER
            self._graphs, self._step = watch.graphs, measured(begin, end, allocated.moves, watch.loop_runs, unseen, compiled)
        finally:
            _profiler_lock.release()

    @property
    def measured(self) -> MeasuredStep:
        """The bytes alive over the seconds of the step, and its loops."""
        if self._step is None:
            raise ProfileError(
                "the profile has no measurement yet",
                found=self._why_unmeasured,
                do="read it after its block: with streamfx.profile() as profile: step()",
            )
        return self._step

    @property
    def _with_bytes(self) -> MeasuredStep:
        """The measurement; raises `ProfileError` if its bytes are unknown, because the profiler did not see all of the step."""
        if self.measured.unseen:
            asked, do = "the profile has no measured bytes", "the seconds of its loops are in summary()"
            raise ProfileError(asked, found=self.measured.unseen, do=do)
        return self.measured

    @property
    def timeline(self) -> Timeline:
        """The measurement as a timeline with one entry, as in `streamfx.explain`."""
        return self._with_bytes.timeline

    @property
    def peak_bytes(self) -> int:
        """The peak of the bytes alive, relative to the start of the block."""
        return self._with_bytes.timeline.peak_bytes

    @cached_property
    def predicted_peak_bytes(self) -> int | None:
        """The predicted peak of activations and gradients of one call.

        None if no graph ran in loops, or if there were several calls, whose values may have been alive at the same time.
        """
        return self._graphs[0].cost.peak if len(self._graphs) == 1 and self._graphs[0] is not None else None

    def summary(self) -> dict[str, Any]:
        """Return the measurement as a dictionary of plain JSON types.

        Returns:
            Seconds in total and in compilation, the measured and the predicted peak, the device, and the loops. A peak
            that was not recorded is None, and `unseen` gives the reason.

        Raises:
            ProfileError: the block is still open.

        Example:
            >>> import torch, streamfx
            >>> with streamfx.profile() as profile:
            ...     x = torch.randn(64, 64).square()
            >>> sorted(profile.summary())
            ['compiled_seconds', 'device', 'loops', 'peak_bytes', 'predicted_peak_bytes', 'seconds', 'unseen']
        """
        return as_plain(self.measured, self.predicted_peak_bytes)

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace for ui.perfetto.dev and chrome://tracing: bytes as a counter, stages and loops as tracks.

        Args:
            path: of the file to write.

        Returns:
            Its path.

        Raises:
            ReportError: the file cannot be written.
            ProfileError: the block is still open.

        Example:
            >>> import tempfile, torch, streamfx
            >>> with streamfx.profile() as profile:
            ...     x = torch.randn(64, 64).square()
            >>> profile.to_perfetto(tempfile.mkdtemp() + "/step.json").name
            'step.json'
        """
        step = self.measured
        return written(checked_path(path), trace_of(step.timeline, {loop.name: loop.stage for loop in step.loops}))

    def __str__(self) -> str:
        return "\n".join(table_of(self.measured, self.predicted_peak_bytes))


@check_call(ProfileError, "streamfx.profile()")
def profile() -> Profile:
    """Measure a training step of a compiled model: bytes alive over time, and the seconds of each loop over chunks.

    Use it as a context manager around one step, preferably not the first one, which compiles (compilation time is listed
    separately). It counts the allocations and frees that torch's profiler reports: on the accelerator if there is one, otherwise
    on the host. Only tensors allocated in the block, by the thread that entered it or by autograd's threads, count. On CUDA it
    synchronizes around each loop, so the step takes slightly longer than usual.

    Returns:
        A `Profile`, complete after the block: it prints as a table, `to_perfetto(path)` writes it as a trace, and `summary()` is
        a dictionary.

    Raises:
        ProfileError: inside of another `profile`, or while another torch profiler is active. The profile raises it, too, if its
            bytes were not recorded: the step ran in another thread, or another profiler was opened in the block.

    Example:
        >>> import torch, streamfx
        >>> from torch.nn import functional as F
        >>> def loss(w, x): return F.cross_entropy((x @ w).flatten(0, 1), torch.zeros(256, dtype=torch.long))
        >>> w, x = torch.randn(8, 50, requires_grad=True), torch.randn(1, 256, 8)
        >>> step = torch.compile(loss, backend="streambp", options={"chunk_size": 64, "loss_chunk_size": 64})
        >>> step(w, x).backward()
        >>> with streamfx.profile() as profile:
        ...     step(w, x).backward()
        >>> profile.measured.loops[0].chunks
        4
    """
    return Profile()


def _acquire_profiler() -> None:
    """Take the lock that a measurement holds; raise `ProfileError`, without the lock, if another profiler is active."""
    asked, do = "cannot measure a step", "measure one step at a time"
    if not _profiler_lock.acquire(blocking=False):
        raise ProfileError(asked, found="another streamfx.profile() is active", do=do)
    if is_profiled():
        _profiler_lock.release()
        raise ProfileError(asked, found="torch's profiler is active in this thread, and only one can be", do=do)


class _Watch:
    """The probe of a measurement: compiled graphs and loops call it as they run, and it records them."""

    def __init__(self) -> None:
        """`loop_runs` lists each loop as (begin, end, name, stage, forward or backward graph, number of chunks)."""
        self.graphs: list[CostedProgram | None] = []
        self.loop_runs: list[tuple[int, int, str, str, str, int]] = []
        self.ran_in_other_thread = False

    def now(self) -> int:
        """Wait until the device has finished all queued work, and return the time in nanoseconds since the epoch."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.time_ns()

    def on_forward(self, costed_program: Any) -> None:
        """Record that a forward graph with loops starts; `costed_program`, which predicts its cost, may be None (unknown)."""
        self.graphs.append(costed_program)
        self.ran_in_other_thread |= not is_profiled()

    def run_loop(self, name: str, origin: LoopOrigin, num_chunks: int, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run a loop by calling `run`, record its begin and end, and return its results. `origin`: its stage and its graph."""
        self.ran_in_other_thread |= not is_profiled()
        begin = self.now()
        results = run()
        self.loop_runs.append((begin, self.now(), name, origin.stage, origin.half, num_chunks))
        return results
