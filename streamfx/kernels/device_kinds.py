"""The kind of device that work is for: that of its tensors, or the one that a plan is made for.

A plan is traced on fake tensors of the CPU, whatever it is for. So no build of PyTorch has to know the device, and yet the
kernels, chunks and sums are those of a run there.
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
    """`type` as PyTorch has it; of those with CUDA its `capability`, and whether the build has flash attention, and cuDNN's
    attention
    where PyTorch prefers that (sdp_utils.cpp: check_prefer_cudnn_attention)."""

    type: str
    capability: tuple[int, int] = (0, 0)
    has_flash: bool = False
    has_cudnn: bool = False


CUDNN_CAPABILITIES = {(9, 0), (10, 0), (10, 3)}
CUDNN_VERSION = 91501  # with it lengths that are no multiple of 128 became right (pytorch#169849)


_supposed: ContextVar[DeviceKind | None] = ContextVar("supposed", default=None)


def kind_of(device: torch.device) -> DeviceKind:
    """What a device is; inside of `supposed` a CPU is taken for the device that is planned for."""
    planned = _supposed.get()
    if planned is not None and device.type == "cpu":
        return planned
    return _own_kind(device)


@cache
def _own_kind(device: torch.device) -> DeviceKind:
    if device.type != "cuda":
        return DeviceKind(device.type)
    capability = torch.cuda.get_device_capability(device)
    has_cudnn = capability in CUDNN_CAPABILITIES and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION
    return DeviceKind("cuda", capability, torch.backends.cuda.is_flash_attention_available(), has_cudnn)


@contextmanager
def supposed(kind: DeviceKind) -> Iterator[None]:
    """Let work on fake tensors of the CPU be priced as if it ran on a device of another kind."""
    token = _supposed.set(kind)
    try:
        yield
    finally:
        _supposed.reset(token)
