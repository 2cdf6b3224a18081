"""Recurrences of the backward graph whose gradients reach back a limited number of rows: truncated adjoint sharding.

A row's gradient comes from the rows after it, through the state. If truncated, it comes only from its own chunk and
the next k chunks, where k chunks contain the requested number of rows. So after each chunk another cotangent of the
state starts from zero: k carries are in progress at a time, which have accumulated 1, 2, ... k chunks.

    after chunk c, and before it            q_1 (of chunk c + 1), q_2 (of c + 1 and c + 2), ... q_k
    chunk c                                 its rows get their gradients from q_k
                                            0, q_1, ... q_{k-1} pass through its rows, and become q_1, q_2, ... q_k

(Adjoint sharding, section 4.3, equation 7: there the reach is counted in rows, as here if a chunk is a single row.)

A carry is a vector of what passes from row to row; its adjoints, slices of it, are the cotangents of the state, which are
truncated. Its other values, such as sums of gradients over rows, are not. The loop's buffer `carry` [k + 1, ...] holds q_1 .. q_k
and a carry in which nothing is truncated.
"""

from __future__ import annotations

import sympy
from torch import Tensor

from streamfx.ir.program import CHUNKS, STEP
from streamfx.ir.recurrence import Truncation
from streamfx.ir.sizes import Size
from streamfx.runtime.chunked_recurrences import Chunk, Recurrence
from streamfx.runtime.runtime_sizes import chunks_holding


class TruncatedRecurrence(Recurrence):
    """A recurrence of the backward graph, truncated: it runs the original recurrence once per carry that is in progress."""

    reverse = True

    def __init__(self, recurrence: Recurrence, truncation: Truncation) -> None:
        """Wrap a recurrence of the backward graph; its other attributes are those of the recurrence.

        Gradients reach back `truncation.num_rows` rows; `adjoints` are the slices of the carry that hold gradients of states, for
        each number of rows that have run, or one entry for all.
        """
        super().__init__(f"truncated_{recurrence.name}", recurrence.axes)
        self.run, self.reach, self.adjoints = recurrence, truncation.num_rows, truncation.adjoints
        self.block, self.needs_states, self.carry_size = recurrence.block, recurrence.needs_states, recurrence.carry_size

    @property
    def carry_shape(self) -> tuple[Size, ...]:
        """The shape [k + 1, ...] of the buffer: k chunks hold at least `reach` - 1 rows; at most all chunks but one."""
        return 1 + sympy.Min(chunks_holding(self.reach - 1, STEP), CHUNKS - 1), self.carry_size

    def start(self, carry: Tensor, operands: tuple[Tensor, ...]) -> None:
        self.run.start(carry[0], operands)

    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the chunk's rows once per carry q_k, ... q_1, 0, each of which becomes the next; return the gradients of q_k.

        In the first chunk, all carries are equal, so it runs once.
        """
        carry = chunk.carry
        assert carry is not None
        if chunk.before == 0:
            outputs = self.run.run_chunk(chunk._replace(carry=carry[0], next_carry=carry[0]), operands)
            carry[1:].copy_(carry[:1])
            return outputs
        adjoint_slices = self.adjoints[len(self.adjoints) - 1 - chunk.before if len(self.adjoints) > 1 else 0]
        untruncated = carry[-1].clone()
        for start, stop in adjoint_slices:
            untruncated[start:stop].zero_()
        results: list[tuple[Tensor, ...]] = []
        for num_chunks in range(len(carry) - 1, -1, -1):
            restarted = untruncated.clone()
            for start, stop in adjoint_slices if num_chunks else ():
                restarted[start:stop].copy_(carry[num_chunks - 1, start:stop])
            results.append(self.run.run_chunk(chunk._replace(carry=restarted, next_carry=restarted), operands))
            carry[num_chunks].copy_(restarted)
        return results[0]
