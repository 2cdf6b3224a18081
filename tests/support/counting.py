"""FLOPs of operators as they run, those of compiled code among them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Adds up what `flops_of` says of each operator."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def flops_of(self, func: Any, args: Any, result: Any) -> int:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += self.flops_of(func, args, result)
        return result
