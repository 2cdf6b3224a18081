"""PyTorch's `scan` over rows as one operator, chunk by chunk of the sequence.

The operands are the first carry, the operands with rows (along dimension 0), and operands that all rows share.
`plan.combine` takes the carry and a row of each operand, and returns the next carry and a row of each result. Between
chunks, a buffer of bytes (`carry`) holds the carry's values; a slot is the place of one of them. `states` [chunks, ...]
holds the buffers with which the forward loop's chunks began, and `chunk` is a chunk's index there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from streamfx.ir.recurrence import ScanPlan
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.select_row import additive_identity
from streamfx.torch_private import SCAN, FakeTensor

ALIGNED = 16  # bytes: alignment that suits every dtype


class ChunkedScan(Recurrence):
    """The graph operator that runs a `ScanPlan`, on all rows or in a loop over chunks."""

    carry_type = torch.uint8

    def __init__(self, plan: ScanPlan) -> None:
        """Wrap the plan of one scan; fx prints this operator of the graph as `__name__`.

        `axes`: the axis labels of operands and results; `reverse`: rows run from last to first; `carry_size`: bytes.
        """
        self.plan = plan
        self.name, self.axes, self.reverse = plan.name, plan.axes, plan.reverse
        self._slots = list(slots(plan.carry))
        self.carry_size = self._slots[-1][1] if self._slots else 0
        self.__name__ = self.__qualname__ = plan.name
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run all rows; return the final carry values that are used, and the rows of the results."""
        first_carry, row_operands, shared = self._split_operands(operands)
        if any(isinstance(operand, FakeTensor) for operand in operands):
            # only shapes are needed: torch's scan traces one row
            outputs = SCAN(self.plan.combine, first_carry, row_operands, shared)
            return (*(outputs[i] for i in self.plan.final_carries), *outputs[len(first_carry) :])
        last_carry, outputs = self._run(first_carry, row_operands, shared)
        return (*(last_carry[i] for i in self.plan.final_carries), *outputs)

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows from the carry, and update it; save the old carry in `states` unless that is None."""
        if states is not None:
            states[chunk].copy_(carry)
        return self._run_chunk(before, after, carry, operands)

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows, last to first, from the carry, and update it."""
        return self._run_chunk(before, after, carry, operands)

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        return self._run_chunk(before, after, states[chunk].clone(), operands)

    def _run_chunk(self, before: int, after: int, carry: Tensor, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the chunk's rows and update the carry; return the final values that are used, and the rows of the results.

        `before` and `after`: the number of rows that run before and after the chunk's. Only the chunk that holds the last
        row returns the final values; others return an additive identity.
        """
        first_carry, row_operands, shared = self._split_operands(operands)
        last_carry, outputs = self._run(first_carry if before == 0 else self._read_carry(carry), row_operands, shared)
        is_last = after == 0 and row_operands[0].shape[0] > 0
        for (start, stop), value in zip(self._slots, last_carry, strict=True):
            carry[start:stop].view(value.dtype)[: value.numel()].copy_(value.reshape(-1))
        finals = [last_carry[i] for i in self.plan.final_carries]
        return (*(value if is_last else additive_identity(value.shape, value.dtype, value.device) for value in finals), *outputs)

    def _read_carry(self, carry: Tensor) -> list[Tensor]:
        """Return copies of the carry's values from its bytes, each with its shape and dtype."""
        slices = (carry[start:stop].clone() for start, stop in self._slots)
        return [data.view(dtype)[: prod(shape)].view(shape) for data, (shape, dtype) in zip(slices, self.plan.carry, strict=True)]

    def _run(
        self, carry: Sequence[Tensor], row_operands: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Run `combine` on each row in order; return the carry after the last one, and the rows of each result, stacked."""
        plan, num_rows = self.plan, row_operands[0].shape[0]
        steps = []
        for step in reversed(range(num_rows)) if plan.reverse else range(num_rows):
            result = plan.combine(*carry, *(operand.select(0, step) for operand in row_operands), *shared)
            carry = result[: len(plan.carry)]
            steps.append(result[len(plan.carry) :])
        if plan.reverse:
            steps.reverse()
        results = [torch.stack(values) for values in zip(*steps, strict=True)]
        like = row_operands[0]
        return carry, results if steps else [like.new_empty((0, *shape), dtype=dtype) for shape, dtype in plan.row_results]

    def _split_operands(self, operands: tuple[Tensor, ...]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Split the operands into the first carry, the operands with rows, and the tensors that all rows share."""
        carries, rows = len(self.plan.carry), len(self.plan.carry) + self.plan.num_row_operands
        return operands[:carries], operands[carries:rows], operands[rows:]


def slots(carry: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each value in the carry's buffer, in bytes, given its (shape, dtype)."""
    start = 0
    for shape, dtype in carry:
        size = -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        yield start, start + size
        start += size
