"""Recurrences, chunk by chunk: a chunk runs its rows from the carry that the chunk before it returned.

The `carry`, a vector, holds the values that cross from one row to the next. The forward loop saves the carry at the
start of each chunk in `states` [chunks, ...]. The backward loop recomputes a chunk's values from there, and carries
the cotangents from the last row to the first.

An unrolled recurrence is a loop over rows whose operators were all traced: step t is the operators of row t. While steps run,
their values are kept in an `env`, a dictionary from a number (`ValueId`) to the value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.ir.recurrence import RecurrenceAxes, RecurrencePlan, RowRead, Steps, StepValue, ValueId
from streamfx.ir.sizes import Size
from streamfx.runtime.select_row import additive_identity

Env = dict[ValueId, Any]


class Chunk(NamedTuple):
    """A chunk of the rows of a recurrence, and its carries.

    `before`, `after`: the numbers of rows that run before and after the chunk's; in a `reverse` recurrence, the rows that
    follow the chunk in the sequence run before it. `chunk_index`: its index in the loop. `carry`: the carry before its rows;
    None if they are all rows. `next_carry`: where to write the carry after its rows; None if it is not needed.
    `forward_carry`: in the backward graph, the carry with which the forward chunk began; None if there is none.
    """

    before: int = 0
    after: int = 0
    chunk_index: int = 0
    carry: Tensor | None = None
    next_carry: Tensor | None = None
    forward_carry: Tensor | None = None


class Recurrence(ABC):
    """An operator of a graph that processes rows in order, from the last to the first if `reverse`.

    A call with full operands runs all rows. In a loop over chunks of the sequence, `advance` and `resume` run the
    rows of one chunk: `before` rows run before them and `after` rows after them. `carry` is the loop's buffer of bytes for the
    values that pass from row to row; it begins as zeros. `states` [chunks, ...] holds the carries with which the chunks of the
    forward loop began, and `chunk` is the chunk's index there. A subclass implements `run_chunk`.
    """

    reverse: bool
    carry_size: Size  # bytes of the carry
    block: int = 1  # chunks begin at multiples of this many rows
    needs_states: bool = False  # if `reverse`: it needs the states with which the forward chunks began

    def __init__(self, name: str, axes: RecurrenceAxes) -> None:
        """Set the name that fx prints for this operator of the graph, and the axis labels of its operands and results."""
        self.name, self.axes = name, axes
        self.__name__ = self.__qualname__ = name
        self.__module__ = type(self).__module__

    def __repr__(self) -> str:
        return f"streamfx.{self.name}"

    @property
    def carry_shape(self) -> tuple[Size, ...]:
        """The shape of the buffer that a loop keeps between two chunks."""
        return (self.carry_size,)

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run all rows."""
        return self.run_chunk(Chunk(), operands)

    @abstractmethod
    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the chunk's rows in order from its carry, and write its next carry; return the chunk's results."""

    def start(self, carry: Tensor, operands: tuple[Tensor, ...]) -> None:
        """Write the values before the first row, which some operands hold, to the carry of zeros; by default, there are none."""
        return

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows in order, and update the carry in place; return the chunk's results.

        A forward recurrence first saves the carry in `states[chunk]`, a backward one reads it there, unless `states` is None.
        """
        if before == 0:
            self.start(carry, operands)
        forward_carry = None if states is None else states[chunk]
        if forward_carry is not None and not self.reverse:
            forward_carry.copy_(carry)
        return self.run_chunk(Chunk(before, after, chunk, carry, carry, forward_carry), operands)

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        """Recompute the chunk's rows, first to last, from the carry `states[chunk]`, saved when the chunk began."""
        return self.run_chunk(Chunk(before, after, chunk, states[chunk]), operands)


class UnrolledRecurrence(Recurrence):
    """A recurrence that was traced row by row: a chunk runs the operators of its rows, the steps.

    If the plan has `recomputed` steps, it is a backward loop, which runs these forward steps of a chunk before its own.
    """

    def __init__(self, plan: RecurrencePlan) -> None:
        """Wrap a plan. A backward loop needs states if forward steps that it recomputes start from a carry."""
        super().__init__(plan.name, plan.axes)
        self.plan, self.reverse, self.carry_size = plan, plan.steps.reverse, plan.steps.carry_size
        self.needs_states = plan.recomputed is not None and plan.recomputed.carry_size > 0

    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the chunk's steps; a backward loop first recomputes the chunk's forward steps."""
        env, recomputed = self._shared_values(operands), self.plan.recomputed
        rows, first, stop = self._rows(chunk, operands)
        if recomputed is not None:
            restore_carry(recomputed, env, first, chunk.forward_carry)
            run_steps(recomputed, env, rows, first, stop, keeps=True)
        return self._run_steps(chunk, env, operands)

    def resume_kept(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Any, ...]:
        """Run `resume`; return its results, followed by the values of all steps (as one `env`), for `advance_from`.

        Results of single steps are cloned, so that they share no memory with a kept value.
        """
        env = self._shared_values(operands)
        values = self._run_steps(Chunk(before, after, chunk, states[chunk]), env, operands, keeps=True)
        num_concat = len(self.plan.steps.concat_results)
        return (*values[:num_concat], *(final.clone() for final in values[num_concat:]), env)

    def advance_from(self, before: int, after: int, carry: Tensor, kept: Env, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run `advance` with the values of the forward steps in the same chunk (`kept`), instead of recomputing them."""
        chunk = Chunk(before, after, carry=carry, next_carry=carry)
        return self._run_steps(chunk, {**kept, **self._shared_values(operands)}, operands)

    def can_reuse_kept(self, forward: UnrolledRecurrence) -> bool:
        """Return whether the forward recurrence runs exactly the steps that this one would recompute, on operands it has.

        Then a backward loop that recomputes the forward's chunk anyway does not run its steps twice.
        """
        has_operands = forward.plan.rows.keys() <= self.plan.rows.keys() and {*forward.plan.shared} <= {*self.plan.shared}
        return forward.plan.steps is self.plan.recomputed and has_operands

    def _run_steps(self, chunk: Chunk, env: Env, operands: tuple[Tensor, ...], keeps: bool = False) -> tuple[Tensor, ...]:
        """Run the chunk's own steps from its carry, and write its next carry; return the chunk's results.

        `env`: the values so far, to which steps add theirs; if `keeps`, all of them stay there.
        """
        steps = self.plan.steps
        rows, first, stop = self._rows(chunk, operands)
        start_boundary, end_boundary = (stop, first) if steps.reverse else (first, stop)
        restore_carry(steps, env, start_boundary, chunk.carry)
        run_steps(steps, env, rows, first, stop, keeps)
        values = collect_results(steps, env, first, stop, operands[0])
        if chunk.next_carry is not None and stop > first:
            store_carry(steps, env, end_boundary, chunk.next_carry)
        return values

    def _shared_values(self, operands: tuple[Tensor, ...]) -> Env:
        """Return the operands without rows, by the value that they are."""
        return dict(zip(self.plan.shared, operands[len(self.plan.rows) :], strict=True))

    def _rows(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[dict[ValueId, Tensor], int, int]:
        """Return the operands with rows, by identifier, and the first and last + 1 of the chunk's rows in the sequence."""
        rows = dict(zip(self.plan.rows, operands, strict=False))
        dim = next(iter(self.plan.rows.values()))
        first = chunk.after if self.reverse else chunk.before
        return rows, first, first + operands[0].shape[dim]


def run_steps(steps: Steps, env: Env, rows: Mapping[ValueId, Tensor], first: int, stop: int, keeps: bool = False) -> None:
    """Run steps [first, stop), and add their values to `env`. Unless `keeps`, drop each value after its last use.

    `rows`: the operands with rows; each has the rows [first, stop), so step t reads its row t - first.
    """

    def resolve(item: Any) -> Any:
        """Return the value in `env` for a reference to it; other arguments unchanged."""
        return env[item.value_id] if isinstance(item, StepValue) else item

    for step in range(stop - 1, first - 1, -1) if steps.reverse else range(first, stop):
        for item in steps.steps[step]:
            if isinstance(item, RowRead):
                env[item.result_id] = rows[item.operand].select(item.dim, item.step - first)
            else:
                args, kwargs = pytree.tree_map(resolve, (item.args, dict(item.kwargs)))
                env[item.result_id] = item.target(*args, **kwargs)
        if steps.dead_after and not keeps:
            for value_id in steps.dead_after[step]:
                env.pop(value_id, None)


def collect_results(steps: Steps, env: Env, first: int, stop: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return the rows [first, stop) of the results that stack one value per step, followed by the results of single steps.

    If a single step is in another chunk, its result is an additive identity (-0), because the loop adds over chunks. `like`: a
    tensor whose device the results have.
    """
    values: list[Tensor] = []
    for concat in steps.concat_results:
        rows = [env[value_id] for value_id in concat.values[first:stop]]
        empty = like.new_empty((*concat.shape[: concat.dim], 0, *concat.shape[concat.dim + 1 :]), dtype=concat.dtype)
        values.append(torch.stack(rows, concat.dim) if rows else empty)
    for result in steps.single_step_results:
        is_in_chunk = first <= result.step < stop
        values.append(env[result.value] if is_in_chunk else additive_identity(result.shape, result.dtype, like.device))
    return tuple(values)


def restore_carry(steps: Steps, env: Env, boundary: int, carry: Tensor | None) -> None:
    """Copy the values that cross the boundary between steps `boundary` - 1 and `boundary` from the carry into `env`."""
    for slot in steps.crossing[boundary]:
        assert carry is not None
        env[slot.value] = slot.read(carry)


def store_carry(steps: Steps, env: Env, boundary: int, carry: Tensor) -> None:
    """Copy the values that cross the boundary between steps `boundary` - 1 and `boundary` from `env` into the carry."""
    for slot in steps.crossing[boundary]:
        slot.write(carry, env[slot.value])
