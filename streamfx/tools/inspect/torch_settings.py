"""Settings of torch that change how a step computes, to repeat them in another process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TorchSettings:
    """Settings of a process; `autocast`: the devices for which autocast is on, with its dtypes."""

    threads: int
    default_dtype: torch.dtype
    default_device: torch.device
    matmul_precision: str
    deterministic: int
    autocast: dict[str, torch.dtype]

    @classmethod
    def current(cls) -> TorchSettings:
        """Return the settings of this process."""
        return cls(
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_float32_matmul_precision(),
            torch.get_deterministic_debug_mode(),
            {name: torch.get_autocast_dtype(name) for name in AUTOCAST_DEVICES if torch.is_autocast_enabled(name)},
        )

    def apply(self) -> None:
        """Set all but autocast, for the full process."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        if self.default_device.type != "cpu":  # a default device slows every call
            torch.set_default_device(self.default_device)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_deterministic_debug_mode(self.deterministic)

    @contextmanager
    def with_autocast(self) -> Iterator[None]:
        """Context manager: turn autocast on for the devices that had it on."""
        with ExitStack() as stack:
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype))
            yield
