"""Private interfaces of torch's profiler: which bytes its allocators give out and take back, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

PROBE = 12_347  # bytes of a tensor that is made when all is over: whether the profiler saw that is whether it saw to the end


@dataclass
class Allocations:
    """What a profiler has seen: `moves` are moments in nanoseconds since the epoch, bytes that came or went, and the device's
    kind, in order. `is_complete` says whether it was on to the end: another profiler that is opened meanwhile takes its place.
    """

    moves: list[tuple[int, int, str]] = field(default_factory=list)
    is_complete: bool = False


def is_profiled() -> bool:
    """Whether a profiler is on in this thread: it is told of what this thread allocates, and no other but autograd's (2.13)."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextmanager
def allocations() -> Iterator[Allocations]:
    """What this thread's allocators give and take, those of the host and of devices, also of what Inductor's code makes; there
    once the block is left (2.13).
    """
    found = Allocations()
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with profiler:
        try:
            yield found
        finally:
            torch.empty(PROBE, dtype=torch.uint8, device="cpu")
    results = profiler.kineto_results
    events: Any = () if results is None else results.events()
    moves = (
        (event.start_ns(), event.nbytes(), event.device_type().name.lower()) for event in events if event.name() == "[memory]"
    )
    found.moves = sorted(moves, key=lambda move: move[0])
    found.is_complete = any(size == PROBE and kind == "cpu" for _, size, kind in found.moves[-2:])
