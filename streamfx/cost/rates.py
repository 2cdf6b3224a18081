"""Approximate device speeds, to weigh time against memory. They never decide correctness."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamfx.kernels.device_kinds import device_kind


@dataclass(frozen=True)
class Rates:
    """Rates reached in practice: FLOPs of products and bytes of memory per second, and the seconds of one kernel launch.

    `tokens` is the number of rows that keeps the device busy.
    """

    flops: float
    bandwidth: float
    launch: float
    tokens: int

    def seconds(self, flops: int = 0, moved: int = 0, launches: int = 0) -> float:
        """Return the time of some work: FLOPs, bytes moved, and kernel launches, added up."""
        return flops / self.flops + moved / self.bandwidth + launches * self.launch


CPU = Rates(flops=2e11, bandwidth=2e10, launch=2e-6, tokens=64)
CUDA = Rates(flops=5e14, bandwidth=2e12, launch=5e-6, tokens=2048)  # for 16-bit products on an H100


def rates_of(device: torch.device) -> Rates:
    """Return the speeds of a device's kind."""
    return CPU if device_kind(device).type == "cpu" else CUDA
