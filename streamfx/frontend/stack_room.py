"""Room on Python's stack for deep and frequent calls, as of a compiler.

CPython keeps frames in chunks of 16 KiB. If the depth of calls varies around the end of a chunk, each call maps a chunk, and each
return unmaps it: tracing and planning then take twice as long. A frame larger than a chunk gets one of the next power of two
above its size, whose rest holds the frames of its callees.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

NUM_SLOTS = 40_000  # of 8 bytes: 312 KiB, in a chunk of 512 KiB, of which only what is used takes memory


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function."""
    return function(*arguments)


# calls a function from a frame with so many slots
call_with_room = cast(Callable[..., Any], FunctionType(_call.__code__.replace(co_stacksize=NUM_SLOTS), globals()))
