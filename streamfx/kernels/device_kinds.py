"""The kind of device for which code is chosen: the device of its tensors, or the device that a plan targets.

A plan is always traced on fake CPU tensors. So the PyTorch build need not support the target device, and yet kernels,
chunk sizes and accumulators are chosen as in a run there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceKind:
    """`type` as PyTorch names it, and for CUDA devices the compute `capability` and the available kernels.

    `has_flash`: the build has flash attention. `has_cudnn`: PyTorch prefers cuDNN's attention (sdp_utils.cpp:
    check_prefer_cudnn_attention).
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    has_flash: bool = False
    has_cudnn: bool = False


CUDNN_CAPABILITIES = {(9, 0), (10, 0), (10, 3)}
CUDNN_VERSION = 91501  # the first version with correct results for lengths not divisible by 128 (pytorch#169849)


_planned_kind: ContextVar[DeviceKind | None] = ContextVar("planned_device_kind", default=None)


def device_kind(device: torch.device) -> DeviceKind:
    """Return the kind of a device; inside `pretend_device` the planned kind for CPUs, whose tensors represent its tensors."""
    planned = _planned_kind.get()
    if planned is not None and device.type == "cpu":
        return planned
    return _kind_of_real_device(device)


@cache
def _kind_of_real_device(device: torch.device) -> DeviceKind:
    """Return the kind of a device of this machine: its type, capability and attention kernels. A CPU has only a type."""
    if device.type != "cuda":
        return DeviceKind(device.type)
    capability = torch.cuda.get_device_capability(device)
    has_cudnn = capability in CUDNN_CAPABILITIES and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION
    return DeviceKind("cuda", capability, torch.backends.cuda.is_flash_attention_available(), has_cudnn)


@contextmanager
def pretend_device(kind: DeviceKind) -> Iterator[None]:
    """Context manager for a plan: inside it `device_kind` returns `kind` for the CPU."""
    token = _planned_kind.set(kind)
    try:
        yield
    finally:
        _planned_kind.reset(token)
