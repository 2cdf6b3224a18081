"""The speed of a device, from published or measured rates, and the kernels it supports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from streamfx.argument_checks import choices_hint
from streamfx.cost.comm import Traffic
from streamfx.cost.work import ATTENTION, Work
from streamfx.errors import PlanError
from streamfx.kernels.device_kinds import CUDNN_CAPABILITIES, DeviceKind, device_kind

EFFICIENCY = 0.6  # assumed fraction of the published rates if there is no measurement
HOPPER_REACHES = (0.69, 0.8)  # measured fractions of FLOP/s and bytes/s for a decoder on an H100 (docs/performance.md)


@dataclass(frozen=True)
class Device:
    """Achieved FLOP/s of 16-bit matrix products and achieved memory bandwidth. `kind` determines the available kernels.

    `wires` are the bytes per second sent to devices of the same machine and of other machines, `to_host` those copied
    to or from the host; None if unknown. `attention` maps kernels of `cost.work.ATTENTION` to their FLOP/s; the default
    is the rate of products.
    """

    name: str
    flops: float
    bandwidth: float
    kind: DeviceKind
    wires: tuple[float, float] | None = None
    to_host: float | None = None
    attention: Mapping[str, float] = field(default_factory=dict)

    @property
    def near_and_far(self) -> tuple[float, float]:
        """Bytes per second that each device sends in a ring, within a machine and between machines."""
        if self.wires is None:
            raise PlanError(
                "the communication rates of this machine are not measured", do=f"plan for one of {', '.join(PUBLISHED)}"
            )
        return self.wires

    def sending(self, traffic: Traffic) -> float:
        """Return the seconds to send `traffic`: the part within the machine, then the part between machines."""
        if not traffic.bytes:
            return 0.0
        near, far = self.near_and_far
        return (traffic.bytes - traffic.far) / near + traffic.far / far

    def copying(self, size: int) -> float:
        """Return the seconds to copy `size` bytes to the host or back, or zero if the rate is unknown."""
        return size / self.to_host if self.to_host else 0.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of `work`: matrix products, attention at the rate of each kernel, memory traffic of other
        operators, and the fraction of accumulator traffic that matrix products wait for.

        The host launches operators concurrently; the result is at least the launch time.
        """
        by_kernel = {name: getattr(work, name) for name in ATTENTION}
        other_flops = work.flops - sum(by_kernel.values())
        computing = other_flops / self.flops + sum(
            count / self.attention.get(name, self.flops) for name, count in by_kernel.items()
        )
        waits = work.launches * LAUNCH_SECONDS if self.kind.type == "cuda" else 0
        return max(computing + (work.moved + EXPOSED_ACCUMULATION * work.total_bytes) / self.bandwidth, waits)


HOST_BANDWIDTH = EFFICIENCY * 307e9  # bytes/s of a host's memory: published rate of 8 channels of DDR5-4800
LAUNCH_SECONDS = 5e-6  # seconds of the host per operator
EXPOSED_ACCUMULATION = (
    0.5  # fraction of accumulator traffic that is not hidden: 0.28 to 0.66 on an H100, for weights of a layer and the head
)
HOPPER = {  # FLOP/s of causal attention with heads of 128, 8K to 32K keys, on an H100 (`python -m benchmarks.gpu kernels`)
    "cudnn": 570e12,
    "cudnn_backward": 490e12,
    "flash": 345e12,
    "flash_backward": 310e12,
}
REACHED = ("H100", "H200")  # devices whose rates are the measured fractions in `HOPPER_REACHES`, and those of `HOPPER`
PUBLISHED = {
    # Dense bfloat16 FLOP/s, bytes/s of memory, capability; bytes/s in one direction: to the host (PCIe 4.0 or 5.0, 16 lanes),
    # within a machine (NVLink, Infinity Fabric, else PCIe), and between machines (network).
    "A100": (312e12, 2.039e12, (8, 0), 32e9, 300e9, 25e9),
    "H100": (989e12, 3.35e12, (9, 0), 64e9, 450e9, 50e9),
    "H200": (989e12, 4.8e12, (9, 0), 64e9, 450e9, 50e9),
    "B200": (2250e12, 8.0e12, (10, 0), 64e9, 900e9, 50e9),
    "L40S": (362e12, 0.864e12, (8, 9), 32e9, 32e9, 25e9),
    "RTX4090": (165e12, 1.008e12, (8, 9), 32e9, 32e9, 12.5e9),
    "MI300X": (1307e12, 5.3e12, (9, 4), 64e9, 448e9, 50e9),
}


def device_by_name(name: str) -> Device:
    """Return a device by name; "here" is measured."""
    if name == "here":
        return measure_device()
    names_by_lower = {key.lower(): key for key in PUBLISHED}
    if str(name).lower() not in names_by_lower:
        raise PlanError(f"there are no rates of a device {name!r}", do=choices_hint(name, (*PUBLISHED, "here")))
    name = names_by_lower[name.lower()]
    flops, bandwidth, capability, to_host, near, far = PUBLISHED[name]
    kind = DeviceKind("cuda", capability, has_flash=True, has_cudnn=capability in CUDNN_CAPABILITIES)
    computing, moving = HOPPER_REACHES if name in REACHED else (EFFICIENCY, EFFICIENCY)
    wires, attention = (EFFICIENCY * near, EFFICIENCY * far), HOPPER if name in REACHED else {}
    return Device(name, computing * flops, moving * bandwidth, kind, wires, EFFICIENCY * to_host, attention)


def local_device() -> torch.device:
    """Return the device of this machine."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_device() -> Device:
    """Measure the device of this machine with one matrix product and one copy."""
    device = local_device()
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    generator = torch.Generator(device).manual_seed(0)  # leaves the user's generators unchanged
    # Random values, as in training: with constant values a GPU draws less power and runs at a higher clock.
    factor, other_factor = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    product = _seconds(lambda: torch.mm(factor, other_factor), device)
    copy = _seconds(lambda: torch.add(factor, 1), device)
    return Device(f"this {device.type}", 2 * size**3 / product, 2 * factor.nbytes / copy, device_kind(device))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the best of four runs, after a warm-up run that loads kernels and waits for earlier work."""
    _timed(work, device)
    return min(_timed(work, device) for _ in range(4))


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, including queued work of the device."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
