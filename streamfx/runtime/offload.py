"""Values that wait on the host for the backward half, and their copies to and from a CUDA device.

    forward half                                      backward half
    held = to_host(x)         begins a copy           x = from_host(held)     allocates x, begins a copy
    ... loops of the next stage ...                   ... loops of the stage before ...
    free_after_copy(held, x)  compute waits           wait_for_copy(x)        compute waits

Copies run on a stream of their own, one per device, beside the loops of one stage. Where these nodes stand in an outer graph is
decided in `passes/lowering/copies.py`. On a CPU, whose memory is the host's, values wait in memory-mapped files, which the system
writes to disk if memory is short.

# NOTE [Memory that two streams touch]
Memory of the device is allocated and freed on the compute stream alone. Two orders make that safe:
- A copy begins after all that the compute stream was asked for before: the source has been computed, and kernels that used the
  destination's memory before it was freed are done.
- The compute stream waits for a copy's event before the tensor on the device is read or freed. The next kernel may be given its
  memory as soon as the host has dropped it. So a `_Copy` holds the source, or is held by the destination, until the compute
  stream has been made to wait; if an exception ends a half in the middle, the copy's destructor makes it wait.
`record_stream` would do neither: the allocator frees such memory only when the host sees the event complete, and a host that runs
ahead of the device allocates more meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from streamfx.runtime.files import mapped
from streamfx.runtime.pinned import PinnedBlocks
from streamfx.torch_private.autograd import saved_tensors_are_packed

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("to_host(Tensor value) -> Tensor")
_library.define("from_host(Tensor held, Device device) -> Tensor")

BESIDE: dict[str, Any] = {"cuda": torch.cuda}  # by type of device: the module of its streams, if copies run beside its work
_COPY = "_streamfx_copy"  # an attribute of a held or fetched tensor: its copy, until the compute stream waits for it
_streams: dict[torch.device, _CopyStream] = {}
_lock = threading.Lock()


class _CopyStream:
    """The one stream on which copies of a device run, and the blocks of the host that they fill and read."""

    def __init__(self, beside: Any, device: torch.device) -> None:
        self.beside, self.device, self.stream = beside, device, beside.Stream(device)
        self.blocks = PinnedBlocks(beside, device, self.stream)

    def begin(self, target: Tensor, source: Tensor, keeps: bool) -> _Copy:
        """Copy after all that the current stream was asked for; the host goes on. The copy may keep its source alive."""
        compute = self.beside.current_stream(self.device)
        self.stream.wait_stream(compute)
        running: AbstractContextManager[Any] = self.beside.stream(self.stream)
        with running:
            target.copy_(source, non_blocking=True)
            event = self.beside.Event()
            event.record(self.stream)
        return _Copy(event, compute, source if keeps else None)


class _Copy:
    """A copy that the compute stream has not waited for; it keeps its source on the device alive until then.

    See NOTE [Memory that two streams touch].
    """

    def __init__(self, event: Any, compute: Any, source: Tensor | None) -> None:
        self.event, self.compute, self.source = event, compute, source
        self.is_waited_for = False

    def wait(self, compute: Any) -> None:
        compute.wait_event(self.event)
        self.is_waited_for = True

    def __del__(self) -> None:
        if not self.is_waited_for:
            self.wait(self.compute)


def copy_stream(device: torch.device) -> _CopyStream | None:
    """The copy stream of a device, or None if its memory is the host's. Threads that ask at once get the same one: blocks of
    pinned memory are used again in the order of that stream.
    """
    beside = BESIDE.get(device.type)
    if beside is None:
        return None
    with _lock:
        if device not in _streams:
            _streams[device] = _CopyStream(beside, device)
        return _streams[device]


@torch.library.impl(_library, "to_host", "CompositeExplicitAutograd")
def _to_host(value: Tensor) -> Tensor:
    stream = copy_stream(value.device)
    if stream is None:
        return mapped(value)
    held = stream.blocks.empty_like(value)
    if held.stride() != value.stride():  # a copy between two layouts would allocate on the copy stream
        value = torch.empty_like(held, device=value.device).copy_(value)
    setattr(held, _COPY, stream.begin(held, value, keeps=True))
    return held


@torch.library.impl(_library, "from_host", "CompositeExplicitAutograd")
def _from_host(held: Tensor, device: torch.device) -> Tensor:
    stream = copy_stream(device)
    if stream is None:
        return held.to(device, copy=True)
    value = torch.empty_like(held, device=device)
    setattr(value, _COPY, stream.begin(value, held, keeps=False))
    return value


@torch.library.register_fake("streamfx::to_host", lib=_library)  # type: ignore[untyped-decorator]
def _fake_to_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu")


@torch.library.register_fake("streamfx::from_host", lib=_library)  # type: ignore[untyped-decorator]
def _fake_from_host(held: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(held, device=device)


to_host = torch.ops.streamfx.to_host.default
from_host = torch.ops.streamfx.from_host.default


def wait_for_copy(value: Tensor) -> Tensor:
    """A fetched value, for the current stream to read: it waits for the value's own copy, and for none that was begun later."""
    copy: _Copy | None = vars(value).pop(_COPY, None)
    if copy is not None:
        copy.wait(BESIDE[value.device.type].current_stream(value.device))
    return value


def free_after_copy(held: Tensor, value: Tensor) -> Tensor:
    """The held copy of a value; from now on the value's memory may be given to what the current stream is asked for next.

    An outer graph passes the value so that it is alive until here, on real tensors and on fake ones.
    """
    copy: _Copy | None = vars(held).pop(_COPY, None)
    if copy is not None:
        copy.wait(BESIDE[value.device.type].current_stream(value.device))
        if saved_tensors_are_packed():  # a hook may read the held copy on the host
            copy.event.synchronize()
    return held
