"""A lock around tracing: a model's tensors, torch's settings and Dynamo's cache belong to the process, not to a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_lock = RLock()  # reentrant: a plan calls `explain`


def serialized(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that only one thread at a time runs any function wrapped this way."""

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function while holding the lock."""
        with _lock:
            return function(*args, **kwargs)

    return locked
