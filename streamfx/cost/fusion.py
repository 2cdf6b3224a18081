"""Bytes moved if a compiler fuses operators, as Inductor does: values read only by element-wise operators are not written.

    gate = x @ a;  s = silu(gate);  up = x @ b;  p = s * up;  y = p @ c

Before `p @ c` one kernel reads `gate` and `up` and writes `p`; `s` is never in memory. So the value of a fusible operator
is pending until an operator that is not fused reads it. Then one kernel computes this value, and the pending values on
which it depends, from values in memory; it writes those that are still referenced.
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
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
# separate kernels, although they compute no products
NOT_FUSED = of_kind(Kind.SORT, Kind.TOPK, Kind.PUT) | {aten.scatter_add.default, aten.embedding_dense_backward.default}


@dataclass(eq=False)
class FusedMemory:
    """A tensor's memory: its bytes and, while it is pending, the values from which it is computed."""

    size: int
    sources: tuple[tuple[FusedMemory, int], ...] = ()  # with the bytes read of each
    is_pending: bool = False
    is_referenced: bool = True


class Fusion:
    """Tracks operators, and counts the bytes that fused kernels move, and the kernels."""

    def __init__(self) -> None:
        """Start without values; `_values` has the memory of each storage, by its address."""
        self._values: dict[int, FusedMemory] = {}  # by storage

    def run_operator(self, func: Any, operands: Any, out: Any) -> tuple[int, int]:
        """Track an operator; return the bytes moved, and kernels launched, to compute the pending values that it reads.

        The caller counts the operator's own bytes.
        """
        operand_values = [(self._value(tensor), tensor.nbytes) for tensor in tensors_in(operands)]
        if is_fusible(func):
            for tensor in tensors_in(out):
                self._value(tensor, FusedMemory(tensor.nbytes, tuple(operand_values), is_pending=True))
            return 0, 0
        return self._compute([value for value, _ in operand_values if value.is_pending])

    def flush(self) -> tuple[int, int]:
        """Compute all pending values that are still referenced; return the bytes moved and kernels launched."""
        return self._compute([value for value in self._values.values() if value.is_pending])

    def _value(self, tensor: Tensor, new: FusedMemory | None = None) -> FusedMemory:
        """Return the memory of a tensor's storage; if the storage is unknown, record it as `new`, or as in memory."""
        storage = tensor.untyped_storage()
        if (value := self._values.get(storage._cdata)) is None:
            value = self._values[storage._cdata] = new or FusedMemory(storage.nbytes())
            weakref.finalize(storage, self._mark_freed, storage._cdata)
        return value

    def _mark_freed(self, key: int) -> None:
        """Forget a freed storage: no kernel has to write its value."""
        self._values.pop(key).is_referenced = False

    def _compute(self, pending: Sequence[FusedMemory]) -> tuple[int, int]:
        """Compute these pending values in one kernel; return (bytes moved, kernels launched)."""
        if not pending:
            return 0, 0
        computed, bytes_read = set(pending), dict[FusedMemory, int]()
        todo = list(pending)
        while todo:
            for source, size in todo.pop().sources:
                if not source.is_pending:
                    bytes_read[source] = max(bytes_read.get(source, 0), size)
                elif source not in computed:
                    computed.add(source)
                    todo.append(source)
        written_values = [value for value in computed if value.is_referenced]
        for value in written_values:
            value.is_pending, value.sources = False, ()
        return sum(bytes_read.values()) + sum(value.size for value in written_values), 1


def is_fusible(func: Any) -> bool:
    """Return whether a compiler fuses an operator into the kernels of its neighbors."""
    if not isinstance(func, OpOverload) or func in NOT_FUSED or func._schema.is_mutable or has_flops(func):
        return False
    return func.namespace in ("aten", "prims")
