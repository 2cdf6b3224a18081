"""Private interfaces of torch's profiler: the bytes that allocators allocate and free, and when.

"(2.13)": the torch version on which it was tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

PROBE_BYTES = 12_347  # size of a tensor that is allocated at the end: if the profiler recorded it, it was active until then


@dataclass
class Allocations:
    """Allocations that a profiler recorded.

    `moves`, in order of time: (nanoseconds since the epoch, bytes: negative if they are freed, device type such as "cuda").
    `is_complete`: the profiler was active until the end. Another profiler that starts meanwhile replaces it.
    """

    moves: list[tuple[int, int, str]] = field(default_factory=list)
    is_complete: bool = False


def is_profiled() -> bool:
    """Return whether a profiler is active in this thread. It records the allocations of this thread and of autograd (2.13)."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Context manager that records the allocations of this thread, on the host and on devices (2.13).

    It also covers allocations by Inductor's code. The yielded object is filled when the block ends. A last allocation of
    `PROBE_BYTES` shows whether the profiler was still active then.
    """
    recorded = Allocations()
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    profiler.__enter__()
    try:
        yield recorded
    finally:
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cpu")
        with suppress(RuntimeError):  # if another profiler has replaced this one (2.11; later versions return normally)
            profiler.__exit__(None, None, None)
    results = profiler.kineto_results
    events: Any = () if results is None else results.events()
    sized_events = (
        (event.start_ns(), event.nbytes(), event.device_type().name.lower()) for event in events if event.name() == "[memory]"
    )
    recorded.moves = sorted(sized_events, key=lambda move: move[0])
    recorded.is_complete = any(size == PROBE_BYTES and kind == "cpu" for _, size, kind in recorded.moves[-2:])
