"""Bytes that operators move if a compiler fuses them, as Inductor does: a value that only element-wise work reads is never
written.

    gate = x @ a;  s = silu(gate);  up = x @ b;  p = s * up;  y = p @ c

Before `p @ c` one kernel reads `gate` and `up` and writes `p`; `s` is never in memory. So a value of a fusible operator is
pending until an operator that is not fused reads it. Then one kernel computes it, and all pending values that it is made of,
from values that are in memory; it writes those that somebody still holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamfx.cost.flops import has_flops
from streamfx.cost.nested_tensors import tensors_in
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
NOT_FUSED = {  # kernels of their own, though they compute no products
    aten.sort.stable,
    aten.sort.default,
    aten.topk.default,
    aten.index_put.default,
    aten.scatter_add.default,
    aten.embedding_dense_backward.default,
}


@dataclass(eq=False)
class FusedMemory:
    """A tensor's memory: its bytes, and the values that it is computed from while it is pending."""

    size: int
    sources: tuple[tuple[FusedMemory, int], ...] = ()  # with the bytes that are read of each
    is_pending: bool = False
    is_held: bool = True


class Fusion:
    """Follows operators, and counts what fused kernels read and write, and how many there are."""

    def __init__(self) -> None:
        self._values: dict[int, FusedMemory] = {}  # by storage

    def follow(self, func: Any, given: Any, out: Any) -> tuple[int, int]:
        """Bytes moved, and kernels launched, because an operator reads values that are pending; its own are the caller's to
        count."""
        read = [(self._value(tensor), tensor.nbytes) for tensor in tensors_in(given)]
        if is_fusible(func):
            for tensor in tensors_in(out):
                self._value(tensor, FusedMemory(tensor.nbytes, tuple(read), is_pending=True))
            return 0, 0
        return self._computed([value for value, _ in read if value.is_pending])

    def flush(self) -> tuple[int, int]:
        """The same because all pending values are written that somebody holds."""
        return self._computed([value for value in self._values.values() if value.is_pending])

    def _value(self, tensor: Tensor, new: FusedMemory | None = None) -> FusedMemory:
        """What is known of a tensor's storage; of one that is met first that it is `new`, or in memory."""
        storage = tensor.untyped_storage()
        if (value := self._values.get(storage._cdata)) is None:
            value = self._values[storage._cdata] = new or FusedMemory(storage.nbytes())
            weakref.finalize(storage, self._freed, storage._cdata)
        return value

    def _freed(self, key: int) -> None:
        self._values.pop(key).is_held = False

    def _computed(self, wanted: Sequence[FusedMemory]) -> tuple[int, int]:
        """One kernel for these pending values."""
        if not wanted:
            return 0, 0
        computed, read = set(wanted), dict[FusedMemory, int]()
        todo = list(wanted)
        while todo:
            for source, size in todo.pop().sources:
                if not source.is_pending:
                    read[source] = max(read.get(source, 0), size)
                elif source not in computed:
                    computed.add(source)
                    todo.append(source)
        written = [value for value in computed if value.is_held]
        for value in written:
            value.is_pending, value.sources = False, ()
        return sum(read.values()) + sum(value.size for value in written), 1


def is_fusible(func: Any) -> bool:
    """Whether a compiler computes an operator inside of the kernels of its neighbors."""
    if not isinstance(func, OpOverload) or func in NOT_FUSED or func._schema.is_mutable or has_flops(func):
        return False
    return func.namespace in ("aten", "prims")
