"""Python's garbage collector rests while a plan is traced.

A trace makes millions of objects that live until it is read. What the collector would find among them is little, and it would
look at all of them again and again: a sixth of the time of a plan. Between two traces of a search it takes away what is left.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _PauseCount:
    """How many ask that it rests: threads come and go in any order, and the last one to go lets it work again."""

    def __init__(self) -> None:
        self.lock, self.count, self.worked = Lock(), 0, True

    def change(self, by: int) -> None:
        with self.lock:
            if self.count == 0:
                self.worked = gc.isenabled()
            self.count += by
            if self.count > 0:
                gc.disable()
            elif self.worked:
                gc.enable()


_rests = _PauseCount()


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside of it nothing is collected, unless somebody asks for it; afterwards as before."""
    _rests.change(1)
    try:
        yield
    finally:
        _rests.change(-1)


@contextmanager
def collected() -> Iterator[None]:
    """Inside of it the collector works, though it rests around it: for a process that nobody else has threads in."""
    around = _rests.count
    _rests.change(-around)
    try:
        yield
    finally:
        _rests.change(around)
