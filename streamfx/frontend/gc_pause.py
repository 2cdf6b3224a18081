"""Pause Python's garbage collector while a plan is traced.

A trace creates millions of objects that stay alive until it is read. The collector would free few of them and scan
all of them repeatedly, which takes a sixth of the time of a plan. It runs between two traces of a search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _PauseCount:
    """Counts active pauses across threads; the collector resumes when the last one ends."""

    def __init__(self) -> None:
        self.lock, self.count, self.was_enabled = Lock(), 0, True

    def change(self, by: int) -> None:
        """Add to the number of pauses; disable collection with the first one, restore it after the last one."""
        with self.lock:
            if self.count == 0:
                self.was_enabled = gc.isenabled()
            self.count += by
            if self.count > 0:
                gc.disable()
            elif self.was_enabled:
                gc.enable()


_pause_count = _PauseCount()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable automatic collection inside the context, and restore its state afterwards."""
    _pause_count.change(1)
    try:
        yield
    finally:
        _pause_count.change(-1)


@contextmanager
def collected() -> Iterator[None]:
    """Enable collection inside an `uncollected` context; only for a process without other threads in such contexts."""
    num_pauses = _pause_count.count
    _pause_count.change(-num_pauses)
    try:
        yield
    finally:
        _pause_count.change(num_pauses)
