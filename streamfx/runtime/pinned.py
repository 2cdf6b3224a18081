"""Pinned host memory for values that wait for the backward graph, in blocks, each of which wastes less than a page.

PyTorch's allocator rounds pinned memory up to a power of two: 17 GiB occupy 32 GiB. A block here is an anonymous
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

from streamfx.budget import format_bytes, free_memory
from streamfx.errors import OffloadSpaceError
from streamfx.kernels.process_limits import limit_of
from streamfx.log import log

HOST = torch.device("cpu")
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
MAX_BLOCK_RATIO = 2  # size of a reused block, relative to its value
RECENT_ALLOCATIONS = 1024  # number of allocations over which the recent peak is taken
NOT_REGISTERED = (
    "cudaHostRegister refused %s of pinned memory (%s). Offloaded values use PyTorch's pinned memory instead, which rounds each "
    "up to a power of two: this value takes %s, of which %s are wasted."
)


def bytes_pinned(size: int) -> int:
    """Return the host bytes that a value of this size occupies: full pages. Plans also use this function."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def bytes_pinned_by_torch(size: int) -> int:
    """Return the bytes of PyTorch's pinned memory that a value of this size occupies: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


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
    """The pinned blocks of one device. `runtime` is the module of its streams (`torch.cuda`), `stream` its copy stream."""

    def __init__(self, runtime: Any, device: torch.device, stream: Any) -> None:
        """Start without blocks; the class explains the arguments."""
        self.runtime, self.device, self.stream = runtime, device, stream
        self.in_use = 0  # bytes of the blocks that hold a value
        self.unused: list[PinnedBlock] = []  # most recently used last
        self.registers = True  # False after the CUDA runtime has refused a block: then PyTorch allocates
        self._returned: deque[PinnedBlock] = deque()  # filled by finalizers, which may run in any thread and must not take a lock
        self._recent_bytes: deque[int] = deque(maxlen=RECENT_ALLOCATIONS)  # bytes in use at each recent allocation
        self._lock = threading.Lock()

    def empty_like(self, value: Tensor) -> Tensor:
        """Return an empty tensor in pinned memory with the shape, dtype and (dense) strides of a value.

        Raises:
            OffloadSpaceError: if the host has no memory left.
        """
        layout = torch.empty_like(value, device="meta")
        if not value.numel():
            return torch.empty_like(value, device="cpu")
        tensor = torch.empty(0, dtype=value.dtype)
        with torch.no_grad():
            return tensor.set_(self._allocate(value.nbytes).untyped_storage(), 0, layout.shape, layout.stride())

    def _allocate(self, size: int) -> Tensor:
        """Return a tensor of `size` bytes in a new or unused block; when its storage dies, the block is unused.

        If the CUDA runtime registers no blocks, the bytes are PyTorch's pinned memory.
        """
        with self._lock:
            self._collect_returned()
            block = self._unused_for(size) or self._new_block(size)
            if block is None:
                return self._allocate_by_torch(size)
            self.in_use += block.size
            self._recent_bytes.append(self.in_use)
            self._shrink(self.in_use)
        view = memoryview(block.memory)[:size]
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)  # the tensor holds the view until its storage is freed

    def _collect_returned(self) -> None:
        """Move the blocks whose tensors have died, which finalizers have queued, to the unused ones."""
        while self._returned:
            block = self._returned.popleft()
            self.in_use -= block.size
            self.unused.append(block)

    def _unused_for(self, size: int) -> PinnedBlock | None:
        """Remove and return the smallest unused block that fits, and of several equal blocks the most recently used one.

        None if all are too small, or larger than `MAX_BLOCK_RATIO` times the size.
        """
        fitting = [block for block in reversed(self.unused) if size <= block.size <= MAX_BLOCK_RATIO * bytes_pinned(size)]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: block.size)
        self.unused.remove(block)
        return block

    def _shrink(self, needed: int) -> None:
        """Release the oldest unused blocks, so that used and unused ones are at most `needed` bytes or the recent peak.

        `needed`: the bytes in use, with those about to be allocated.
        """
        excess = needed + sum(block.size for block in self.unused) - max(needed, *self._recent_bytes, 0)
        num_released = 0
        while excess > 0:
            excess -= self.unused[num_released].size
            num_released += 1
        if num_released:
            self._release_oldest(num_released)

    def _release_oldest(self, count: int) -> None:
        """Wait for the copy stream, and return the memory of the `count` oldest unused blocks to the system."""
        self.stream.synchronize()  # see NOTE [When a block is used again]
        for block in self.unused[:count]:
            with self.runtime.stream(self.stream):  # on its device: otherwise the runtime would initialize another one
                code = int(self.runtime.cudart().cudaHostUnregister(block.address))
            if code:
                raise RuntimeError(f"cudaHostUnregister failed with error {code}")
        # a mapping ends with its last reference: after it was unregistered, and after a view that is just being freed
        del self.unused[:count]

    # -- new blocks

    def _new_block(self, size: int) -> PinnedBlock | None:
        """Allocate a block, or return None if the CUDA runtime refuses to register it."""
        if not self.registers:
            return None
        rounded = bytes_pinned(size)
        self._shrink(self.in_use + rounded)
        self._check_room(rounded)
        try:
            block = PinnedBlock(mmap.mmap(-1, rounded))  # shared, so that a fork does not copy pages that a device writes to
        except OSError as error:
            raise self._space_error(rounded, str(error.strerror or error)) from error
        with self.runtime.stream(self.stream):
            code = int(self.runtime.cudart().cudaHostRegister(block.address, rounded, PORTABLE))
        if not code:
            return block
        self.registers = False
        forget_error(self.device)
        rounded_by_torch = bytes_pinned_by_torch(size)
        log.warning(
            NOT_REGISTERED,
            format_bytes(rounded),
            f"error {code}",
            format_bytes(rounded_by_torch),
            format_bytes(rounded_by_torch - size),
        )
        return None

    def _allocate_by_torch(self, size: int) -> Tensor:
        """Return `size` bytes of PyTorch's pinned memory.

        Raises:
            OffloadSpaceError: if they cannot be pinned.
        """
        try:
            return pinned_by_torch(size)
        except RuntimeError as error:
            limit = limit_of_locked_memory()
            limit_note = "" if limit is None else f"; RLIMIT_MEMLOCK is {format_bytes(limit)}"
            raise self._space_error(size, f"it cannot be pinned ({str(error).splitlines()[0]}){limit_note}") from error

    def _check_room(self, size: int) -> None:
        """Raise `OffloadSpaceError` if `size` bytes are not free, even without the unused blocks.

        Linux overcommits: it would allocate them, and kill the process when it touches the pages.
        """
        if size > free_memory(HOST) and self.unused:
            self._release_oldest(len(self.unused))
        if size > (free := free_memory(HOST)):
            raise self._space_error(size, f"{format_bytes(free)} of the host's memory are free for this process", free)

    def _space_error(self, size: int, found: str, free: int | None = None) -> OffloadSpaceError:
        """Return the error for `size` bytes that the host does not have; `found` is the cause."""
        error = OffloadSpaceError(
            "offload keeps values of stages in pinned memory of the host",
            found=f"no space for {format_bytes(size)}: {found}; {format_bytes(self.in_use)} are in use for other values",
            where=f"the host of {self.device}",
            do="raise the limit of the container, or of locked memory (ulimit -l unlimited); shorten the sequence; "
            'or omit offload ("host" in the output of streamfx plan --offload is the memory that a step needs)',
        )
        error.needed, error.free = size, free
        return error


def pinned_by_torch(size: int) -> Tensor:
    """Return uninitialized bytes in PyTorch's pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def forget_error(device: torch.device) -> None:
    """Clear the error that a refused call leaves in the CUDA runtime, which an unrelated next launch would raise."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def limit_of_locked_memory() -> int | None:
    """Return the bytes that this process may lock, or None if there is no limit."""
    return limit_of("RLIMIT_MEMLOCK")
