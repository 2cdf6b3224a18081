"""Recurrences of the backward half whose gradients reach back few rows: truncated adjoint sharding.

A row's gradient comes from the rows behind it, through the state. Here it comes from those of its own chunk and of the next k
chunks alone, where k chunks have the rows that were asked for. The gradients that a chunk is handed are therefore begun anew
behind each chunk: k carries are on their way at a time, which have seen 1, 2, ... k chunks.

    behind chunk c, and in front of it      q_1 (of chunk c + 1), q_2 (of c + 1 and c + 2), ... q_k
    chunk c                                 its rows get their gradients from q_k
                                            0, q_1, ... q_{k-1} go through its rows, and are q_1, q_2, ... q_k from then on

(Adjoint sharding, section 4.3, equation 7: there the rows are counted one by one, as here where a chunk is one row.)
"""

from __future__ import annotations

import sympy
from torch import Tensor

from streamfx.ir.program import CHUNKS, STEP
from streamfx.ir.recurrence import Truncation
from streamfx.ir.sizes import Size
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.runtime_sizes import chunks_holding


class TruncatedRecurrence(Recurrence):
    """A recurrence of the backward half that is truncated."""

    reverse = True

    def __init__(self, run: Recurrence, truncation: Truncation) -> None:
        self.run, self.reach, self.adjoints = run, truncation.rows, truncation.adjoints
        self.name, self.axes, self.block = f"truncated_{run.name}", run.axes, run.block
        self.carried, self.carry_type, self.needs_states = run.carried, run.carry_type, run.needs_states
        self.__name__ = self.__qualname__ = self.name
        self.__module__ = __name__

    @property
    def carry_shape(self) -> tuple[Size, ...]:
        """q_1, q_2, ... q_k and what is carried whole; there is nothing behind more chunks than there are."""
        return 1 + sympy.Min(chunks_holding(self.reach - 1, STEP), CHUNKS - 1), self.carried

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """All rows are one chunk."""
        return self.run(*operands)

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        if before == 0:
            made = self.run.retreat(before, after, carry[0], states, chunk, *operands)
            carry[1:].copy_(carry[:1])
            return made
        begun = self.adjoints[len(self.adjoints) - 1 - before if len(self.adjoints) > 1 else 0]
        whole = carry[-1].clone()
        for start, stop in begun:
            whole[start:stop].zero_()
        results: list[tuple[Tensor, ...]] = []
        for chunks in range(len(carry) - 1, -1, -1):
            own = whole.clone()
            for start, stop in begun if chunks else ():
                own[start:stop].copy_(carry[chunks - 1, start:stop])
            results.append(self.run.retreat(before, after, own, states, chunk, *operands))
            carry[chunks].copy_(own)
        return results[0]

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the last to the first")

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the last to the first")
