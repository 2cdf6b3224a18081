"""Private interfaces of torch's profiler: which bytes its allocators give out and take back, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def is_profiled() -> bool:
    """Whether a profiler is on in this thread (2.13)."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextmanager
def allocations() -> Iterator[list[tuple[int, int, str]]]:
    """Moments in nanoseconds since the epoch, bytes that came or went, and the device's kind, in order; there once the block is
    left. Those of the host's and of devices' allocators, also of what Inductor's code makes (2.13).
    """
    found: list[tuple[int, int, str]] = []
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with profiler:
        yield found
    results = profiler.kineto_results
    events: Any = () if results is None else results.events()
    moves = (
        (event.start_ns(), event.nbytes(), event.device_type().name.lower()) for event in events if event.name() == "[memory]"
    )
    found += sorted(moves, key=lambda move: move[0])
