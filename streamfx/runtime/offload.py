"""Values that wait on the host for the backward graph, and their copies to and from a CUDA device.

    forward graph                                     backward graph
    held = to_host(x)         begins a copy           x = from_host(held)     allocates x, begins a copy
    ... loops of the next stage ...                   ... loops of the previous stage ...
    free_after_copy(held, x)  compute waits           wait_for_copy(x)        compute waits

Copies run on a separate stream per device, concurrently with the loops of one stage. `passes/lowering/copies.py`
places these nodes in the host program. On a CPU, values wait in memory-mapped files, which the system writes to disk
if memory is short.

# NOTE [Memory that two streams touch]
Device memory is allocated and freed on the compute stream only. Two orderings make that safe:
- A copy begins after all work queued on the compute stream: the source has been computed, and kernels that used the
  destination's memory before it was freed are done.
- The compute stream waits for a copy's event before the tensor on the device is read or freed, because the next
  kernel may get its memory as soon as the host has dropped it. So a `_Copy` holds the source, or is held by the
  destination, until the compute stream waits. If an exception ends a graph early, the copy's
  destructor makes it wait.
`record_stream` would not work: the allocator frees such memory only after the host sees the event complete, and a
host that runs ahead of the device allocates more in the meantime.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from streamfx.dialect.declare import implement
from streamfx.dialect.offload import from_host, to_host
from streamfx.runtime.files import copy_to_file
from streamfx.runtime.pinned import PinnedBlocks
from streamfx.torch_private.autograd import saved_tensors_are_packed

# keyed by device type: the module of its streams, if copies can overlap with compute
STREAM_MODULES: dict[str, Any] = {"cuda": torch.cuda}
_COPY = "_streamfx_copy"  # attribute of a held or fetched tensor: its copy, until the compute stream waits for it
_streams: dict[torch.device, _CopyStream] = {}
_lock = threading.Lock()


class _CopyStream:
    """The CUDA stream on which all copies between a device and the host run, and the pinned host memory that they use."""

    def __init__(self, stream_module: Any, device: torch.device) -> None:
        self.stream_module, self.device, self.stream = stream_module, device, stream_module.Stream(device)
        self.blocks = PinnedBlocks(stream_module, device, self.stream)

    def begin(self, target: Tensor, source: Tensor, keeps: bool) -> _Copy:
        """Queue a copy from `source` to `target` after all work of the current stream, without blocking the host.

        If `keeps`, the returned copy keeps its source alive.
        """
        compute = self.stream_module.current_stream(self.device)
        self.stream.wait_stream(compute)
        on_copy_stream: AbstractContextManager[Any] = self.stream_module.stream(self.stream)
        with on_copy_stream:
            target.copy_(source, non_blocking=True)
            event = self.stream_module.Event()
            event.record(self.stream)
        return _Copy(event, compute, source if keeps else None)


class _Copy:
    """A copy that the compute stream has not waited for yet; until then it keeps its source on the device alive.

    See NOTE [Memory that two streams touch].
    """

    def __init__(self, event: Any, compute: Any, source: Tensor | None) -> None:
        self.event, self.compute, self.source = event, compute, source
        self.is_waited_for = False

    def wait(self, compute: Any) -> None:
        """Make the compute stream wait for the copy."""
        compute.wait_event(self.event)
        self.is_waited_for = True

    def __del__(self) -> None:
        """Make the compute stream wait for the copy, if an exception ended the graph before it did."""
        if not self.is_waited_for:
            self.wait(self.compute)


def copy_stream(device: torch.device) -> _CopyStream | None:
    """Return the copy stream of a device, created on first use; None if the device's memory is the host's.

    Concurrent callers get the same stream: pinned blocks are reused in the order of that stream.
    """
    stream_module = STREAM_MODULES.get(device.type)
    if stream_module is None:
        return None
    with _lock:
        if device not in _streams:
            _streams[device] = _CopyStream(stream_module, device)
        return _streams[device]


def _to_host(value: Tensor) -> Tensor:
    """Implement `streamfx::to_host`: begin to copy a value to pinned host memory; return the copy.

    Until `free_after_copy`, the copy has an attribute with the `_Copy` to wait for, which keeps the value alive. If there
    is no copy stream, copy the value to a file.
    """
    stream = copy_stream(value.device)
    if stream is None:
        return copy_to_file(value)
    held = stream.blocks.empty_like(value)
    if held.stride() != value.stride():  # a copy between two layouts would allocate on the copy stream
        value = torch.empty_like(held, device=value.device).copy_(value)
    setattr(held, _COPY, stream.begin(held, value, keeps=True))
    return held


def _from_host(held: Tensor, device: torch.device) -> Tensor:
    """Implement `streamfx::from_host`: begin to copy a value, which the host holds, to a device; return the copy.

    Until `wait_for_copy`, the copy has an attribute with the `_Copy` to wait for. Without a copy stream, copy at once.
    """
    stream = copy_stream(device)
    if stream is None:
        return held.to(device, copy=True)
    value = torch.empty_like(held, device=device)
    setattr(value, _COPY, stream.begin(value, held, keeps=False))
    return value


implement(to_host, _to_host)
implement(from_host, _from_host)


def wait_for_copy(value: Tensor) -> Tensor:
    """Make the current stream wait for the copy of a fetched value, but not for copies that began later; return the value."""
    copy: _Copy | None = vars(value).pop(_COPY, None)
    if copy is not None:
        copy.wait(STREAM_MODULES[value.device.type].current_stream(value.device))
    return value


def free_after_copy(held: Tensor, value: Tensor) -> Tensor:
    """Make the current stream wait for the copy of `value` into `held`; then the memory of `value` may be reused there.

    `value` is an argument so that it is alive until here, for real and for fake tensors. Return `held`.
    """
    copy: _Copy | None = vars(held).pop(_COPY, None)
    if copy is not None:
        copy.wait(STREAM_MODULES[value.device.type].current_stream(value.device))
        if saved_tensors_are_packed():  # a hook may read the held copy on the host
            copy.event.synchronize()
    return held
