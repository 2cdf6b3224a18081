"""Python's garbage collector rests while a step is traced and compiled.

A trace makes millions of objects that live until it is read. What the collector would find among them is little, and it would
look at all of them again and again: a sixth of the time of a plan. Between two traces of a search it takes away what is left.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def uncollected() -> AbstractContextManager[None]:
    """Inside of it nothing is collected, unless somebody asks for it; afterwards as before."""
    return _switched(False)


def collected() -> AbstractContextManager[None]:
    """Inside of it the collector works, even if it rests around it."""
    return _switched(True)


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    was_enabled = gc.isenabled()
    _switch(on)
    try:
        yield
    finally:
        _switch(was_enabled)


def _switch(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()
