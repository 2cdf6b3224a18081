"""How fast a device is: published rates, or measured ones."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from streamfx.errors import PlanError

EFFICIENCY = 0.6  # of the published rates, what training reaches


@dataclass(frozen=True)
class Device:
    """FLOPs of 16-bit products and bytes of memory moved per second, as reached in practice."""

    name: str
    flops: float
    bandwidth: float

    def seconds(self, flops: int, moved: int) -> float:
        """Time of work that computes so many FLOPs and, in operators that compute none, moves so many bytes."""
        return flops / self.flops + moved / self.bandwidth


PUBLISHED = {  # dense bfloat16 FLOP/s, bytes/s
    "A100": (312e12, 2.039e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "B200": (2250e12, 8.0e12),
    "L40S": (362e12, 0.864e12),
    "RTX4090": (165e12, 1.008e12),
    "MI300X": (1307e12, 5.3e12),
}


def device_called(name: str) -> Device:
    """A device by name; "here" is measured."""
    if name == "here":
        return measured()
    known = {key.lower(): key for key in PUBLISHED}
    if str(name).lower() not in known:
        raise PlanError(f"there are no rates of a device {name!r}", do=f"give one of {', '.join(PUBLISHED)}, or here")
    flops, bandwidth = PUBLISHED[known[name.lower()]]
    return Device(known[name.lower()], EFFICIENCY * flops, EFFICIENCY * bandwidth)


def measured() -> Device:
    """The device of this machine, by one product and one copy."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, dtype = (8192, torch.bfloat16) if place.type == "cuda" else (1024, torch.float32)
    left, right = torch.ones(size, size, device=place, dtype=dtype), torch.ones(size, size, device=place, dtype=dtype)
    product = _seconds(lambda: torch.mm(left, right), place)
    copy = _seconds(lambda: torch.add(left, 1), place)
    return Device(f"this {place.type}", 2 * size**3 / product, 2 * left.nbytes / copy)


def _seconds(work: object, place: torch.device) -> float:
    """The best of a few runs."""
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        best = min(best, time.perf_counter() - start)
    return best
