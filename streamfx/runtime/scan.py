"""PyTorch's `scan` over rows as one operator, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from streamfx.ir.recurrence import ScanPlan
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.select_row import nothing_to_add
from streamfx.torch_private import SCAN, FakeTensor

ALIGNED = 16  # bytes: alignment that suits every dtype


class ChunkedScan(Recurrence):
    """The graph operator that runs a `ScanPlan`.

    Its carry holds the bytes of the values that cross from row to row, of any dtype.
    """

    carry_type = torch.uint8

    def __init__(self, plan: ScanPlan) -> None:
        """Take name, direction and carry layout from the plan; torch names the operator by `__name__`."""
        self.plan = plan
        self.name, self.axes, self.reverse = plan.name, plan.axes, plan.reverse
        self._slots = list(slots(plan.carry))
        self.carry_size = self._slots[-1][1] if self._slots else 0
        self.__name__ = self.__qualname__ = plan.name
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run all rows; return the final values that are used, and the rows of the results."""
        first, rows, given = self._split_operands(operands)
        if any(isinstance(operand, FakeTensor) for operand in operands):
            outputs = SCAN(self.plan.combine, first, rows, given)  # traces a single row: there may be many, or a symbolic number
            return (*(outputs[number] for number in self.plan.final_carries), *outputs[len(first) :])
        last, outputs = self._run(first, rows, given)
        return (*(last[number] for number in self.plan.final_carries), *outputs)

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows from the carry; save the old carry in `states`."""
        if states is not None:
            states[chunk].copy_(carry)
        return self._run_chunk(before, after, carry, operands)

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows, last to first, from the carry."""
        return self._run_chunk(before, after, carry, operands)

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        return self._run_chunk(before, after, states[chunk].clone(), operands)

    def _run_chunk(self, before: int, after: int, carry: Tensor, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the chunk's rows and update the carry.

        Only the chunk holding the last row returns the final values; others return an additive identity.
        """
        first, rows, given = self._split_operands(operands)
        last, outputs = self._run(first if before == 0 else self._read_carry(carry), rows, given)
        is_last = after == 0 and rows[0].shape[0] > 0
        for (start, stop), value in zip(self._slots, last, strict=True):
            carry[start:stop].view(value.dtype)[: value.numel()].copy_(value.reshape(-1))
        finals = [last[number] for number in self.plan.final_carries]
        return (*(value if is_last else nothing_to_add(value.shape, value.dtype, value.device) for value in finals), *outputs)

    def _read_carry(self, carry: Tensor) -> list[Tensor]:
        """Return copies of the values in the carry."""
        slices = (carry[start:stop].clone() for start, stop in self._slots)
        return [
            piece.view(dtype)[: prod(shape)].view(shape) for piece, (shape, dtype) in zip(slices, self.plan.carry, strict=True)
        ]

    def _run(
        self, carry: Sequence[Tensor], rows: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Return the carry after the last row, and the rows of each result."""
        plan, count = self.plan, rows[0].shape[0]
        steps = []
        for step in reversed(range(count)) if plan.reverse else range(count):
            result = plan.combine(*carry, *(operand.select(0, step) for operand in rows), *given)
            carry = result[: len(plan.carry)]
            steps.append(result[len(plan.carry) :])
        if plan.reverse:
            steps.reverse()
        stacks = [torch.stack(values) for values in zip(*steps, strict=True)]
        like = rows[0]
        return carry, stacks if steps else [like.new_empty((0, *shape), dtype=dtype) for shape, dtype in plan.row_results]

    def _split_operands(self, operands: tuple[Tensor, ...]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Split the operands into the first carry, operands with rows, and tensors that all rows share."""
        carries, rows = len(self.plan.carry), len(self.plan.carry) + self.plan.rows
        return operands[:carries], operands[carries:rows], operands[rows:]


def slots(carry: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each value in the carry's buffer, in bytes."""
    start = 0
    for shape, dtype in carry:
        size = -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        yield start, start + size
        start += size
