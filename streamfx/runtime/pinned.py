"""Pinned host memory in blocks that waste less than a page.

PyTorch's allocator rounds pinned memory up to a power of two: 17 GiB take 32 GiB. A block here is an anonymous
mapping with as many pages as its size needs, registered with the CUDA runtime. Registration takes time, so blocks are
kept for the next step.

# NOTE [When a block is used again]
Only copies of one device touch a block, and all of these run on that device's copy stream, in order. So a block may
be reused as soon as its tensor is dead on the host, even if its last copy has not run: the next copy into it comes
later on the same stream. The host waits for the stream only before a block is returned to the system.

Unused blocks never raise the total above the recent peak of bytes in use. So blocks of many sizes do not accumulate
if lengths change, and the host needs no more than the plan of the longest sequence predicts.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamfx.budget import free_on, in_bytes
from streamfx.errors import OffloadSpaceError
from streamfx.kernels.process_limits import limit_of
from streamfx.log import log

HOST = torch.device("cpu")
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
ROOMY = 2  # a block may be at most this many times as large as its value
LATELY = 1024  # number of recent allocations over which the peak is taken
NOT_REGISTERED = (
    "cudaHostRegister refused %s of pinned memory (%s). Offloaded values take PyTorch's pinned memory instead, which rounds each "
    "up to a power of two: %s for this one, %s of them wasted."
)


def bytes_pinned(size: int) -> int:
    """Return the host bytes that a value of this size occupies: full pages. Plans use this, too."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(eq=False)
class PinnedBlock:
    memory: mmap.mmap

    @property
    def size(self) -> int:
        return len(self.memory)

    @property
    def address(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()


class PinnedBlocks:
    """The pinned blocks of one device. `beside` is the module of its streams and runtime, `stream` its copy stream."""

    def __init__(self, beside: Any, device: torch.device, stream: Any) -> None:
        self.beside, self.device, self.stream = beside, device, stream
        self.in_use = 0  # bytes
        self.unused: list[PinnedBlock] = []  # most recently used last
        self.registers = True
        self._returned: deque[PinnedBlock] = deque()  # filled by finalizers, which may run in any thread and must not take a lock
        self._lately: deque[int] = deque(maxlen=LATELY)  # bytes in use at each recent allocation
        self._lock = threading.Lock()

    def empty_like(self, value: Tensor) -> Tensor:
        """Return an empty tensor in pinned memory with the shape, dtype and (dense) strides of a value.

        Raises:
            OffloadSpaceError: if the host has no memory left.
        """
        shape = torch.empty_like(value, device="meta")
        if not value.numel():
            return torch.empty_like(value, device="cpu")
        tensor = torch.empty(0, dtype=value.dtype)
        with torch.no_grad():
            return tensor.set_(self._bytes(value.nbytes).untyped_storage(), 0, shape.shape, shape.stride())

    def _bytes(self, size: int) -> Tensor:
        with self._lock:
            self._collect()
            block = self._unused_for(size) or self._new(size)
            if block is None:
                return self._of_torch(size)
            self.in_use += block.size
            self._lately.append(self.in_use)
            self._shrink(self.in_use)
        view = memoryview(block.memory)[:size]
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)  # the tensor holds the view until its storage is freed

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self.in_use -= block.size
            self.unused.append(block)

    def _unused_for(self, size: int) -> PinnedBlock | None:
        """Remove and return the smallest unused block that fits and is not too large, of several the most recently used one."""
        fitting = [block for block in reversed(self.unused) if size <= block.size <= ROOMY * bytes_pinned(size)]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: block.size)
        self.unused.remove(block)
        return block

    def _shrink(self, needed: int) -> None:
        """Release the oldest unused blocks, until the total is at most `needed` or the recent peak, whichever is larger."""
        excess = needed + sum(block.size for block in self.unused) - max(needed, *self._lately, 0)
        count = 0
        while excess > 0:
            excess -= self.unused[count].size
            count += 1
        if count:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        self.stream.synchronize()  # see NOTE [When a block is used again]
        for block in self.unused[:count]:
            with self.beside.stream(self.stream):  # on its device: otherwise the runtime would initialize another one
                code = int(self.beside.cudart().cudaHostUnregister(block.address))
            if code:
                raise RuntimeError(f"cudaHostUnregister failed with error {code}")
        # a mapping ends with its last reference: after it was unregistered, and after a view that is just being freed
        del self.unused[:count]

    # -- new blocks

    def _new(self, size: int) -> PinnedBlock | None:
        """Allocate a block, or return None if the CUDA runtime refuses to register it."""
        if not self.registers:
            return None
        rounded = bytes_pinned(size)
        self._shrink(self.in_use + rounded)
        self._check_room(rounded)
        try:
            block = PinnedBlock(mmap.mmap(-1, rounded))  # shared, so that a fork does not copy pages that a device writes to
        except OSError as error:
            raise self._no_room(rounded, str(error.strerror or error)) from error
        with self.beside.stream(self.stream):
            code = int(self.beside.cudart().cudaHostRegister(block.address, rounded, PORTABLE))
        if not code:
            return block
        self.registers = False
        forget_error(self.device)
        whole = 1 << (size - 1).bit_length()
        log.warning(NOT_REGISTERED, in_bytes(rounded), f"error {code}", in_bytes(whole), in_bytes(whole - size))
        return None

    def _of_torch(self, size: int) -> Tensor:
        try:
            return pinned_by_torch(size)
        except RuntimeError as error:
            limit = limit_of_locked_memory()
            told = "" if limit is None else f"; RLIMIT_MEMLOCK is {in_bytes(limit)}"
            raise self._no_room(size, f"it cannot be pinned ({str(error).splitlines()[0]}){told}") from error

    def _check_room(self, size: int) -> None:
        """Raise an error if memory is short: Linux overcommits, and kills the process once it touches pages that do not exist."""
        if size > free_on(HOST) and self.unused:
            self._give_back(len(self.unused))
        if size > (free := free_on(HOST)):
            raise self._no_room(size, f"{in_bytes(free)} of the host's memory are free for this process", free)

    def _no_room(self, size: int, found: str, free: int | None = None) -> OffloadSpaceError:
        error = OffloadSpaceError(
            "offload keeps values of stages in pinned memory of the host",
            found=f"no room for {in_bytes(size)}: {found}; {in_bytes(self.in_use)} are in use for others",
            where=f"the host of {self.device}",
            do="raise the limit of the container, or of locked memory (ulimit -l unlimited); shorten the sequence; "
            'or leave out offload (streamfx plan --offload says what a step needs: "host")',
        )
        error.needed, error.free = size, free
        return error


def pinned_by_torch(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def forget_error(device: torch.device) -> None:
    """Clear the error that a refused call leaves in the CUDA runtime, which an unrelated next launch would raise."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def limit_of_locked_memory() -> int | None:
    """Return the bytes that this process may lock, or None if there is no limit."""
    return limit_of("RLIMIT_MEMLOCK")
