"""What is asked of a suite, on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What is empty or None is left to the suite. `tell` shows progress."""

    quick: bool = False
    lengths: tuple[int, ...] = ()
    chunk_sizes: tuple[int, ...] = ()
    rounds: int | None = None
    ways: tuple[str, ...] = ()
    model: str = "small"
    layers: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    cap: int | None = None  # MiB
    tell: Callable[[str], None] = lambda text: None

    @property
    def sizes(self) -> dict[str, Any]:
        """The decoder's, as `workloads.Decoder` takes them."""
        named = {} if self.model == "small" else {"model": self.model}
        return named if self.layers is None else {**named, "num_hidden_layers": self.layers}

    @property
    def place(self) -> dict[str, str]:
        return {"dtype": self.dtype, "device": self.device}

    def chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The ways that were asked for, else those of the suite."""
        return self.ways or names
