"""One look at a step at a time: a model's tensors, torch's settings and Dynamo's code belong to the process, not to a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_lock = RLock()  # a plan explains


def alone(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which waits until no other thread is in one of these."""

    @wraps(function)
    def waits(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return waits
