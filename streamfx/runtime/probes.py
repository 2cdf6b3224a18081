"""Who is told which loops run: nobody, or the one measurement that is on.

It is one for the process, and not of a context: autograd runs backward halves for devices in threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class LoopPlace:
    """Where in a step a loop stands: its stage, and the half that it is part of."""

    stage: str
    half: str


class Probe(Protocol):
    """What is told of runs."""

    def half(self, about: Any) -> None:
        """A forward half begins, of which `about` is known; None of one that runs as it stands."""

    def loop(self, name: str, place: LoopPlace, chunks: int, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Runs a loop, and returns its results."""


class Probes:
    """`by` is None but while something is measured."""

    by: Probe | None = None


watching = Probes()
