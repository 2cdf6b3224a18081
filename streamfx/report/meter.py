"""Follows a program operator by operator: which storages are alive, and how many FLOPs have been spent.

The same meter measures a real step and predicts one: under fake tensors nothing is computed, but tensors are made, shared and
freed by the very same code.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from streamfx.report.flops import arguments_by_name, flops_of, is_fused_attention


class Meter(TorchDispatchMode):
    """Counts what operators inside of it make, until it is freed; tensors from outside count nothing.

    `live` and `peak` are bytes of storages now and at most, `flops` those of products and attention, and
    `masked_flops` those of fused attention without a causal flag, of which a mask may hide some.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = self.masked_flops = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See what compiled code does when it runs, and nothing of its tracing."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        self._note_new(out, (args, kwargs))
        return out

    def restart_peak(self) -> int:
        """The peak so far; from now on the peak is counted from what is alive."""
        peak, self.peak = self.peak, self.live
        return peak

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(func, HigherOrderOperator):  # it may be given an operator to call, with a random state, say
            inner = next((i for i, argument in enumerate(args) if isinstance(argument, OpOverload)), None)
            if inner is None:
                return
            func, args = args[inner], args[inner + 1 :]
        flops = flops_of(func, args, kwargs, out)
        self.flops += flops
        if is_fused_attention(func) and not arguments_by_name(func, args, kwargs).get("is_causal"):
            self.masked_flops += flops

    def _note_new(self, out: Any, arguments: Any) -> None:
        made = {key: storage for key, storage in _storages(out) if key not in self._sizes}
        if not made:
            return
        before = {key for key, _ in _storages(arguments)}
        for key, storage in made.items():
            if key not in before:
                self._sizes[key] = storage.nbytes()
                self.live += self._sizes[key]
                weakref.finalize(storage, self._note_freed, key)
        self.peak = max(self.peak, self.live)

    def _note_freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storages(values: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for value in tree_iter(values):
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            yield storage._cdata, storage
