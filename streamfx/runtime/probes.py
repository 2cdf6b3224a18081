"""A hook by which the one active measurement observes the loops that run.

It is global to the process, and not a context variable, because autograd runs the backward graphs of devices in its
own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class LoopPlace:
    """The position of a loop in a step: its stage, and whether it is part of the forward or the backward graph."""

    stage: str
    half: str


class Probe(Protocol):
    """An observer of runs."""

    def half(self, about: Any) -> None:
        """Called at the start of a forward graph; `about` describes it, or is None if the graph is not chunked."""

    def loop(self, name: str, place: LoopPlace, chunks: int, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run a loop and return its results."""


class Probes:
    """`by` is None unless a measurement is active."""

    by: Probe | None = None


watching = Probes()
