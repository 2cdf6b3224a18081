"""Limit the number of vocabulary columns that a trainer's own head computes at once.

TRL's function creates the logits of 4,096 tokens and 32,768 columns at once, and several copies without Triton. These
gigabytes exceed the memory of the chunked backbone. The *width*, the number of columns, is a constant in TRL's module that each
call reads, and it changes sums only by rounding. It is reduced while a model is enabled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTH_NAME, MAX_COLUMNS = "_CHUNKED_LOGPROB_CHUNK_SIZE", 2048


@dataclass
class _NarrowedWidth:
    """The width of a module before it was reduced, and the number of enabled models for which it is reduced."""

    original: int
    num_models: int = 0


_narrowed_widths: dict[int, _NarrowedWidth] = {}  # by id of a module's globals


class HeadModule:
    """The module (by its globals) that defines a trainer's forward, and has the width as a constant."""

    def __init__(self, module_globals: dict[str, Any]) -> None:
        """Store the module's globals, by name."""
        self.module_globals = module_globals

    def narrow(self) -> None:
        """Reduce the width in TRL's module to `MAX_COLUMNS`, and count one more enabled model, until `restore`."""
        width = _narrowed_widths.setdefault(id(self.module_globals), _NarrowedWidth(self.module_globals[WIDTH_NAME]))
        width.num_models += 1
        self.module_globals[WIDTH_NAME] = min(width.original, MAX_COLUMNS)

    def restore(self) -> None:
        """Count one enabled model less; after the last one, restore the width in TRL's module."""
        width = _narrowed_widths[id(self.module_globals)]
        width.num_models -= 1
        if not width.num_models:
            self.module_globals[WIDTH_NAME] = _narrowed_widths.pop(id(self.module_globals)).original


def find_head(forward: Any) -> HeadModule | None:
    """Return the module that defines `forward`, a trainer's own; None if it does not have the width."""
    module_globals = getattr(forward, "__globals__", {})
    return HeadModule(module_globals) if isinstance(module_globals.get(WIDTH_NAME), int) else None
