"""How much of the vocabulary does a trainer's own head take at once?

TRL's function makes logits of 4,096 tokens and 32,768 columns in one piece, without Triton several times over. That is gigabytes,
more than the streamed backbone takes. The width is a constant of TRL's module that is read at each call and changes no sum but by
rounding. While a model is enabled, it is smaller.
"""

from __future__ import annotations

from typing import Any

NAME, COLUMNS = "_CHUNKED_LOGPROB_CHUNK_SIZE", 2048

_narrowed: dict[int, list[int]] = {}  # by module: the width before, and for how many models it is smaller now


class Head:
    """The names of the module that a trainer's forward was defined in."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def narrow(self) -> None:
        entry = _narrowed.setdefault(id(self.names), [self.names[NAME], 0])
        entry[1] += 1
        self.names[NAME] = min(entry[0], COLUMNS)

    def restore(self) -> None:
        entry = _narrowed[id(self.names)]
        entry[1] -= 1
        if not entry[1]:
            self.names[NAME] = _narrowed.pop(id(self.names))[0]


def head_of(forward: Any) -> Head | None:
    """The head of a trainer's forward; None where the width is kept elsewhere."""
    names = getattr(forward, "__globals__", {})
    return Head(names) if isinstance(names.get(NAME), int) else None
