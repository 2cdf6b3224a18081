"""What no CPU can settle: checks of one GPU, each in a process of its own with a time limit.

`python -m benchmarks gpu` runs them all, prints one line of JSON for each finding as it comes, and a table at the end: at most
eight minutes on an H100. On a CPU (and with --quick) the same checks run on small sizes, which shows that they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where a check runs; a small one has sizes that a CPU is done with in seconds."""

    device: str
    small: bool

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, dtype)

    def wait(self) -> None:
        """Until the device has done all that it was asked for."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Finding:
    """A figure: what was measured of which case, and what it is to be compared with."""

    case: str
    what: str
    number: float | str
    beside: float | None = None

    def row(self, check: str) -> dict[str, Any]:
        is_ratio = self.beside and isinstance(self.number, (int, float))
        ratio = self.number / self.beside if is_ratio else None  # type: ignore[operator]
        return {
            "check": check,
            "case": self.case,
            "what": self.what,
            "figure": self.number,
            "beside": self.beside,
            "ratio": ratio,
        }


@dataclass(frozen=True)
class Check:
    """`seconds` are what it may take."""

    name: str
    seconds: int
    run: Callable[[Place], Iterator[Finding]]


def checks() -> dict[str, Check]:
    """By name, in the order in which they run: what later ones rest on comes first."""
    from benchmarks.gpu import experts, kernels, models, products, steps, versions

    listed = (
        Check("versions", 30, versions.versions),
        Check("products", 40, products.accumulation),
        Check("experts", 40, experts.added_by_group),
        Check("kernels", 120, kernels.against_float64),
        Check("one call", 40, kernels.one_call_against_two),
        Check("one call of documents", 40, kernels.one_call_against_pieces),
        Check("models", 120, models.gradients),
        Check("synchronizations", 60, models.synchronizations),
        Check("steps", 240, steps.beside_checkpointing),
        Check("offload", 90, steps.offload),
    )
    return {check.name: check for check in listed}
