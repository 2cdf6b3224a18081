"""The trace of a search for a plan within a memory budget: the choices tried, and the peak of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEPT_TEXT = {
    "inputs": "only stage inputs kept",
    "attention": "results of attention kept",
    "projections": "attention and the products around it kept",
    "products": "results of all products kept",
}


@dataclass(frozen=True)
class Candidate:
    """A choice of the forward values that a plan keeps for backward: option `save`, applied to one stage in `keep_every`."""

    save: str
    keep_every: int

    def __str__(self) -> str:
        kept_values = KEPT_TEXT[self.save]
        return kept_values if self.keep_every == 1 else f"{kept_values}, of one stage in {self.keep_every}"


@dataclass(frozen=True)
class SimulatedCandidate:
    """A simulated candidate and its peak, in bytes. `working_set` limits the bytes of work per chunk; None: the default limit."""

    candidate: Candidate
    working_set: int | None
    peak: int

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate as a dictionary for JSON reports: its text, its limit in bytes or None, its peak in bytes."""
        return {"choice": str(self.candidate), "chunk_work_bytes": self.working_set, "peak_bytes": self.peak}


@dataclass(frozen=True)
class SearchTrace:
    """All candidates that were simulated for a budget, in bytes."""

    budget: int
    candidates: tuple[SimulatedCandidate, ...]
