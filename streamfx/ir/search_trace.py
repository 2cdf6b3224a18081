"""The trace of a search for a plan within a memory budget: the choices tried, and the peak of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

KEPT_TEXT = {
    "inputs": "only stage inputs kept",
    "attention": "results of attention kept",
    "projections": "attention and the products around it kept",
    "products": "results of all products kept",
}


@dataclass(frozen=True)
class Candidate:
    """A choice of the forward values that a plan keeps for backward: option `save`, applied to one stage in `keep_every`.

    The last `num_richer` of the stages in which `richer` keeps more than this choice are planned like `richer`.
    """

    save: str
    keep_every: int
    num_richer: int = 0
    richer: Candidate | None = None

    def __str__(self) -> str:
        kept_values = KEPT_TEXT[self.save]
        text = kept_values if self.keep_every == 1 else f"{kept_values}, of one stage in {self.keep_every}"
        return text if self.richer is None else f"{text}; in {self.num_richer} later stages, {self.richer}"


class ChunkLimits(NamedTuple):
    """Limits on the bytes of work per chunk: in the stage of the head and the loss, and in all others."""

    layers: int
    loss: int


@dataclass(frozen=True)
class SimulatedCandidate:
    """A simulated candidate and its peak, in bytes. `limits`: those of its chunks; None if all chunk sizes are fixed."""

    candidate: Candidate
    limits: ChunkLimits | None
    peak: int

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate as a dictionary for JSON reports: its text, limits in bytes or None, its peak in bytes."""
        layers, loss = (None, None) if self.limits is None else self.limits
        return {
            "choice": str(self.candidate),
            "is_mixed": self.candidate.richer is not None,
            "chunk_work_bytes": layers,
            "loss_chunk_work_bytes": loss,
            "peak_bytes": self.peak,
        }


@dataclass(frozen=True)
class SearchTrace:
    """All candidates that were simulated for a budget, in bytes, and the chosen one."""

    budget: int
    candidates: tuple[SimulatedCandidate, ...]
    chosen: SimulatedCandidate

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the candidates as dictionaries for JSON reports, with a mark on the chosen one."""
        return [{**candidate.as_dict(), "chosen": candidate is self.chosen} for candidate in self.candidates]
