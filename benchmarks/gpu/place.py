"""Where a check runs, and what checks share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GIB = 1 << 30
LEFT = 256 << 20  # bytes that a check may leave: handles and workspaces of libraries, generators


@dataclass(frozen=True)
class Place:
    """A device, and whether checks run in sizes for which two CPU cores need seconds. `kept` holds what checks share, by name."""

    device: str
    small: bool
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def has_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def compiler(self) -> str:
        """The compiler of baselines. On a CPU, Inductor takes minutes to compile a step."""
        return "aot_eager" if self.small else "inductor"

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        """Normal numbers, drawn on the device: to draw and copy gigabytes on a host takes seconds."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def tokens(self, vocabulary: int, batch: int, length: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(0, vocabulary, (batch, length), generator=generator, device=self.device)

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.has_cuda:
            torch.cuda.synchronize(self.device)

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for all checks of this process."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def clean(self) -> int:
        """Free what a check left: compiled code, which holds weights, and cached memory.

        Returns:
            Bytes of device memory in use, without those of shared models.

        Raises:
            RuntimeError: the device is unusable, as after an illegal memory access.
        """
        torch._dynamo.reset()
        gc.collect()
        if not self.has_cuda:
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        shared = (module for module in self.kept.values() if isinstance(module, torch.nn.Module))
        held = sum(tensor.nbytes for module in shared for tensor in (*module.parameters(), *module.buffers()))
        return max(0, torch.cuda.memory_allocated(self.device) - held)
