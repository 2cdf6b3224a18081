"""How a plan was fitted to a memory budget: the choices that were tried, and the peak of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEPT = {
    "inputs": "only stage inputs kept",
    "attention": "results of attention kept",
    "projections": "attention and the products around it kept",
    "products": "results of all products kept",
}


@dataclass(frozen=True)
class Candidate:
    """Choices that a program is written for; the size of chunks is found afterwards."""

    save: str
    keep_every: int

    def __str__(self) -> str:
        kept = KEPT[self.save]
        return kept if self.keep_every == 1 else f"{kept}, of one stage in {self.keep_every}"


@dataclass(frozen=True)
class SimulatedCandidate:
    """A candidate that was simulated: with chunks of `working_set` bytes of work (None: as asked for) its peak is this."""

    candidate: Candidate
    working_set: int | None
    peak: int

    def as_dict(self) -> dict[str, Any]:
        return {"choice": str(self.candidate), "chunk_work_bytes": self.working_set, "peak_bytes": self.peak}


@dataclass(frozen=True)
class SearchTrace:
    """All that was simulated for a budget, in bytes."""

    budget: int
    tried: tuple[SimulatedCandidate, ...]
