"""Stage inputs that wait on the host for the backward half.

On a CUDA device they are copied to pinned memory and back on a stream of their own, so that copies run beside the work. Work
waits for the copy that it needs and not for those behind it: while one stage runs, the inputs of the next are on their way. On a
CPU, whose memory is the host's, they wait in memory-mapped files, which the system writes to disk when memory is short.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from streamfx.runtime.files import mapped

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("to_host(Tensor value) -> Tensor")
_library.define("from_host(Tensor held, Device device) -> Tensor")

BESIDE: dict[str, Any] = {"cuda": torch.cuda}  # by type of device: streams and events of those whose copies run beside the work
_copied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what came from the host, and the event at the end of its copy


@cache
def copying(device: torch.device) -> Any:
    """The stream on which a device's copies run."""
    return BESIDE[device.type].Stream(device)


def pinned(value: Tensor) -> Tensor:
    """Room on the host for a tensor, which a device can copy to while the host goes on."""
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)


@torch.library.impl(_library, "to_host", "CompositeExplicitAutograd")
def _to_host(value: Tensor) -> Tensor:
    device = BESIDE.get(value.device.type)
    if device is None:
        return mapped(value)
    stream = copying(value.device)
    stream.wait_stream(device.current_stream(value.device))
    with device.stream(stream):
        held = pinned(value).copy_(value, non_blocking=True)
    value.record_stream(stream)  # type: ignore[no-untyped-call]
    return held


@torch.library.impl(_library, "from_host", "CompositeExplicitAutograd")
def _from_host(held: Tensor, device: torch.device) -> Tensor:
    beside = BESIDE.get(device.type)
    if beside is None:
        return held.to(device, copy=True)
    with beside.stream(copying(device)):
        value = torch.empty(held.shape, dtype=held.dtype, device=device).copy_(held, non_blocking=True)
        _copied[value] = event = beside.Event()
        event.record(copying(device))
    value.record_stream(beside.current_stream(device))  # type: ignore[no-untyped-call]
    return value


@torch.library.register_fake("streamfx::to_host", lib=_library)  # type: ignore[untyped-decorator]
def _fake_to_host(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


@torch.library.register_fake("streamfx::from_host", lib=_library)  # type: ignore[untyped-decorator]
def _fake_from_host(held: Tensor, device: torch.device) -> Tensor:
    return torch.empty(held.shape, dtype=held.dtype, device=device)


to_host = torch.ops.streamfx.to_host.default
from_host = torch.ops.streamfx.from_host.default


def arrived(value: Tensor) -> Tensor:
    """The value, once its copy is done: what runs next on the device waits for it, and for none that was asked for later."""
    event = _copied.pop(value, None)
    if event is not None:
        BESIDE[value.device.type].current_stream(value.device).wait_event(event)
    return value
