"""Limit the number of vocabulary columns that a trainer's own head computes at once.

TRL's function creates the logits of 4,096 tokens and 32,768 columns at once, and several copies without Triton. These
gigabytes exceed the memory of the chunked backbone. The *width*, the number of columns, is a constant in TRL's module that each
call reads, and it changes sums only by rounding. It is reduced while a model is enabled.
"""

from __future__ import annotations

from typing import Any

WIDTH_NAME, MAX_COLUMNS = "_CHUNKED_LOGPROB_CHUNK_SIZE", 2048

_width_and_count: dict[int, list[int]] = {}  # by id of a module's globals: [the original width, the number of enabled models]


class Head:
    """The globals of the module that defines a trainer's forward."""

    def __init__(self, names: dict[str, Any]) -> None:
        """Remember the globals, by name."""
        self.names = names

    def narrow(self) -> None:
        """Reduce the width in TRL's module to `MAX_COLUMNS`, and count one more enabled model, until `restore`."""
        width_and_count = _width_and_count.setdefault(id(self.names), [self.names[WIDTH_NAME], 0])
        width_and_count[1] += 1
        self.names[WIDTH_NAME] = min(width_and_count[0], MAX_COLUMNS)

    def restore(self) -> None:
        """Count one enabled model less; if none is left, restore the width in TRL's module."""
        width_and_count = _width_and_count[id(self.names)]
        width_and_count[1] -= 1
        if not width_and_count[1]:
            self.names[WIDTH_NAME] = _width_and_count.pop(id(self.names))[0]


def find_head(forward: Any) -> Head | None:
    """Return the globals of the module that defines `forward`, a trainer's own; None if they do not have the width."""
    names = getattr(forward, "__globals__", {})
    return Head(names) if isinstance(names.get(WIDTH_NAME), int) else None
