"""What `torch.cuda.cudart()` is to pinned memory: calls that register it, held to the driver's rules."""

import mmap
from dataclasses import dataclass, field
from typing import Protocol

NO_MEMORY, NOT_REGISTERED = 2, 713


class Device(Protocol):
    def is_done(self, address: int) -> bool: ...


@dataclass
class CudaRuntime:
    """Registers up to `limit` bytes; at `most` so many were. `registered` has the size of each range by its address, `refused`
    the sizes of others.
    """

    device: Device
    limit: float = float("inf")
    registered: dict[int, int] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    most: int = 0
    error: int = 0  # what the last call that failed has left: the next launch raises it

    def launch(self) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}, of an earlier call")

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 and flags == 1
        assert all(address + size <= begin or begin + own <= address for begin, own in self.registered.items())
        if sum(self.registered.values()) + size > self.limit:
            self.refused.append(size)
            self.error = NO_MEMORY
            return NO_MEMORY
        self.registered[address] = size
        self.most = max(self.most, sum(self.registered.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert self.device.is_done(address), "a copy may still touch this memory"
        return 0 if self.registered.pop(address, 0) else NOT_REGISTERED
