"""`streamfx.profile`: what a step really takes, loop by loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from streamfx.errors import ProfileError
from streamfx.report.brief import Priced
from streamfx.report.measured import Measured, as_plain, measured, table_of
from streamfx.report.paths import checked_path, written
from streamfx.report.perfetto import trace_of
from streamfx.report.timeline import Timeline
from streamfx.runtime.watch import Place, watching
from streamfx.torch_private.allocations import allocations, is_profiled

_turn = threading.Lock()  # held while something is measured


class Profile:
    """What a step took, as `streamfx.profile` has measured it; prints as a table. Complete once its block is left.

    Raises:
        ProfileError: it is asked for anything before.

    Example:
        >>> import torch, streamfx
        >>> with streamfx.profile() as profile:
        ...     x = torch.randn(64, 64).square()
        >>> profile.peak_bytes >= 64 * 64 * 4
        True
    """

    def __init__(self) -> None:
        self._found: Measured | None = None
        self._graphs: list[Priced] = []

    @property
    def measured(self) -> Measured:
        """The bytes alive over the seconds of the step, and its loops."""
        if self._found is None:
            raise ProfileError(
                "a profile is asked for what it has measured",
                found="its block is still running, or has ended with an error",
                do="ask behind the block: with streamfx.profile() as profile: step()",
            )
        return self._found

    @property
    def timeline(self) -> Timeline:
        """The same as a timeline, such as those of `streamfx.explain`, of one course."""
        return self.measured.timeline

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once, beyond those at the begin of the block."""
        return self.measured.peak_bytes

    @cached_property
    def predicted_peak_bytes(self) -> int | None:
        """What was predicted for activations and gradients; None where no training graph ran, or several did."""
        graphs = list(dict.fromkeys(self._graphs))
        return graphs[0].cost.peak if len(graphs) == 1 else None

    def summary(self) -> dict[str, Any]:
        """All of it as a dictionary, in values that JSON knows.

        Returns:
            Seconds, the measured and the predicted peak, the device, and the loops.

        Raises:
            ProfileError: the block is not left yet.

        Example:
            >>> import torch, streamfx
            >>> with streamfx.profile() as profile:
            ...     x = torch.randn(64, 64).square()
            >>> sorted(profile.summary())
            ['device', 'loops', 'peak_bytes', 'predicted_peak_bytes', 'seconds']
        """
        return as_plain(self.measured, self.predicted_peak_bytes)

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace that ui.perfetto.dev and chrome://tracing open: bytes as a counter, stages and loops as tracks.

        Args:
            path: of the file to write.

        Returns:
            Its path.

        Raises:
            ReportError: the file cannot be written.
            ProfileError: the block is not left yet.

        Example:
            >>> import tempfile, torch, streamfx
            >>> with streamfx.profile() as profile:
            ...     x = torch.randn(64, 64).square()
            >>> profile.to_perfetto(tempfile.mkdtemp() + "/step.json").name
            'step.json'
        """
        found = self.measured
        return written(checked_path(path), trace_of(found.timeline, {loop.name: loop.stage for loop in found.loops}))

    def __str__(self) -> str:
        return "\n".join(table_of(self.measured, self.predicted_peak_bytes))


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure what a training step of a compiled model takes: bytes alive over time, and the seconds of each loop over chunks.

    A context manager around one step, better not the first, which compiles. It counts the bytes that allocators give and take
    (torch's profiler tells), those of the accelerator where there are any, else those of the host for tensors that are made in
    the block. On CUDA it waits for the device around each loop, so that a step takes a little longer than by itself.

    Returns:
        A `Profile`, which is complete behind the block: it prints as a table, `to_perfetto(path)` writes it as a trace, and
        `summary()` is a dictionary.

    Raises:
        ProfileError: inside of another `profile`, or while another profiler of torch's is on.

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
    _begin()
    try:
        found, watch = Profile(), _Watch()
        with allocations() as moves:
            watching.by, begin = watch, watch.now()
            try:
                yield found
            finally:
                watching.by, end = None, watch.now()
        found._graphs, found._found = watch.graphs, measured(begin, end, moves, watch.ran)
    finally:
        _turn.release()


def _begin() -> None:
    asked, do = "a step is to be measured", "measure one thing at a time"
    if not _turn.acquire(blocking=False):
        raise ProfileError(asked, found="another streamfx.profile() is on", do=do)
    if is_profiled():
        _turn.release()
        raise ProfileError(asked, found="torch's profiler is on in this thread, and only one can be", do=do)


class _Watch:
    """Notes loops as they run."""

    def __init__(self) -> None:
        self.graphs: list[Priced] = []
        self.ran: list[tuple[int, int, str, str, str, int]] = []

    def now(self) -> int:
        """The moment at which a device has done what it was asked for."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.time_ns()

    def half(self, about: Any) -> None:
        self.graphs.append(about)

    def loop(self, name: str, place: Place, chunks: int, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        begin = self.now()
        results = run()
        self.ran.append((begin, self.now(), name, place.stage, place.half, chunks))
        return results
