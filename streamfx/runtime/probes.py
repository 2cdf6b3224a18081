"""A hook by which the one active measurement (`streamfx.profile`) observes the loops over chunks that run.

It is global to the process, and not a context variable, because autograd runs the backward graphs of devices in its
own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class LoopOrigin:
    """The stage of the model that a loop computes, and the graph that it is part of (`half`): "forward" or "backward"."""

    stage: str
    half: str


class Probe(Protocol):
    """An observer of runs."""

    def on_forward(self, description: Any) -> None:
        """Called at the start of a forward graph, with its description; None if the graph is not chunked."""

    def run_loop(self, name: str, origin: LoopOrigin, num_chunks: int, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Call `run`, which runs a loop over `num_chunks` chunks, and return its results."""


class Measurement:
    """The active measurement: `probe` observes the loops that run, and is None if nothing is measured."""

    probe: Probe | None = None


measurement = Measurement()
