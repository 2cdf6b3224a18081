"""Stage inputs that wait on the host for the backward half.

On a CUDA device they are copied to pinned memory and back on a stream of their own, so that copies run beside the work. On a CPU,
whose memory is the host's, they wait in memory-mapped files, which the system writes to disk when memory is short.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from streamfx.runtime.files import mapped

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("to_host(Tensor value) -> Tensor")
_library.define("from_host(Tensor held, Device device) -> Tensor")


@cache
def copying(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's copies run."""
    return torch.cuda.Stream(device)


@torch.library.impl(_library, "to_host", "CompositeExplicitAutograd")
def _to_host(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return mapped(value)
    stream = copying(value.device)
    stream.wait_stream(torch.cuda.current_stream(value.device))
    with torch.cuda.stream(stream):
        held = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    value.record_stream(stream)  # type: ignore[no-untyped-call]
    return held


@torch.library.impl(_library, "from_host", "CompositeExplicitAutograd")
def _from_host(held: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return held.to(device, copy=True)
    with torch.cuda.stream(copying(device)):
        value = torch.empty(held.shape, dtype=held.dtype, device=device).copy_(held, non_blocking=True)
    value.record_stream(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
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
    """The value, once its copy is done: what runs next on the device waits for it."""
    if value.is_cuda:
        torch.cuda.current_stream(value.device).wait_stream(copying(value.device))
    return value
