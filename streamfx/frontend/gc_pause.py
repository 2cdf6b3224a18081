"""Pause Python's garbage collector while a plan is traced.

A trace creates millions of objects that stay alive until it is read. The collector would free few of them and scan
all of them repeatedly, which takes a sixth of the time of a plan. It runs between two traces of a search. When it resumes, it
scans them once; then they belong to the oldest generation. Otherwise it would soon scan them again, in each generation.
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
        """Add `by` (positive or negative) to the number of active pauses, which may be in several threads.

        The first pause disables the collector. The end of the last pause enables it, if it was enabled before.
        """
        with self.lock:
            if self.count == 0:
                self.was_enabled = gc.isenabled()
            self.count += by
            if self.count > 0:
                gc.disable()
            elif self.was_enabled:
                if gc.get_freeze_count() == 0:  # the program has no frozen objects, which `unfreeze` would release
                    gc.collect(0)
                    gc.freeze()
                    gc.unfreeze()  # all objects now belong to the oldest generation
                gc.enable()


_pause_count = _PauseCount()


@contextmanager
def pause_gc() -> Iterator[None]:
    """Context manager: disable Python's garbage collector in a block, and restore its state afterwards. Blocks may nest."""
    _pause_count.change(1)
    try:
        yield
    finally:
        _pause_count.change(-1)


@contextmanager
def resume_gc() -> Iterator[None]:
    """Context manager: enable collection in a block inside `pause_gc`, by ending all active pauses for this time.

    No other thread may be in a `pause_gc` block, because its pause would also end.
    """
    num_pauses = _pause_count.count
    _pause_count.change(-num_pauses)
    try:
        yield
    finally:
        _pause_count.change(num_pauses)
