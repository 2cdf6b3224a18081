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
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.ir.recurrence import RecurrenceAxes, RecurrencePlan, RowRead, Steps, StepValue, ValueId
from streamfx.ir.sizes import Size
from streamfx.runtime.select_row import additive_identity

Env = dict[ValueId, Any]


class Recurrence(ABC):
    """An operator of a graph that processes rows in order, from the last to the first if `reverse`.

    A call with full operands runs all rows. In a loop over chunks of the sequence, `advance`, `retreat` and `resume` run the
    rows of one chunk: `before` rows run before them and `after` rows after them (for `retreat`: the rows that follow them in the
    sequence run before). `carry` is the loop's buffer for the values that pass from row to row. `states` [chunks, ...]
    holds the carries with which the chunks of the forward loop began, and `chunk` is the chunk's index there.
    """

    name: str
    axes: RecurrenceAxes
    reverse: bool
    carry_size: Size  # elements of the carry
    carry_type: torch.dtype
    block: int = 1  # chunks begin at multiples of this many rows
    needs_states: bool = False  # if `reverse`: it needs the states with which the forward chunks began

    def __repr__(self) -> str:
        return f"streamfx.{self.name}"

    @property
    def carry_shape(self) -> tuple[Size, ...]:
        """The shape of the buffer that a loop keeps between two chunks."""
        return (self.carry_size,)

    @abstractmethod
    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run all rows."""

    @abstractmethod
    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows, first to last, and update the carry in place; return the chunk's results.

        If `states` is not None, save the previous carry there first, at index `chunk`.
        """

    @abstractmethod
    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows, last to first, and update the carry in place; return the chunk's results.

        `before` rows follow the chunk in the sequence, and run before it. `states`: the carries that the forward loop
        saved; None if it saves none.
        """

    @abstractmethod
    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        """Recompute the chunk's rows, first to last, from the carry `states[chunk]`, saved when the chunk began."""

    def can_reuse_kept(self, forward: Recurrence) -> bool:
        """Return whether `forward.resume_kept` computes all values that `retreat_from` needs.

        Then a backward loop that recomputes the forward's chunk anyway does not run its steps twice.
        """
        return False

    def resume_kept(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Any, ...]:
        """Run `resume`; return its results, followed by the values of all steps, for `retreat_from`.

        No result shares memory with one of these values.
        """
        raise NotImplementedError("no recurrence reuses the values of its steps")

    def retreat_from(self, before: int, after: int, carry: Tensor, kept: Env, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run `retreat` with the values of the forward steps in the same chunk (`kept`), instead of recomputing them."""
        raise NotImplementedError("it reuses no values of another recurrence")


class UnrolledRecurrence(Recurrence):
    """A recurrence that was traced row by row: a chunk runs the operators of its rows, the steps.

    If the plan has `recomputed` steps, it is a backward loop, which runs these forward steps of a chunk before its own.
    """

    def __init__(self, plan: RecurrencePlan) -> None:
        """Wrap a plan, the traced steps of one loop over rows; fx prints this operator of the graph as `__name__`.

        `axes`: the axis labels of operands and results; `carry_size`: elements of the carry. `needs_states`: a chunk recomputes
        forward steps that start from a carry of the forward loop.
        """
        self.plan = plan
        self.name, self.axes, self.reverse = plan.name, plan.axes, plan.steps.reverse
        self.carry_size, self.carry_type = plan.steps.carry_size, plan.steps.dtype
        self.needs_states = plan.recomputed is not None and plan.recomputed.carry_size > 0
        self.__name__ = self.__qualname__ = plan.name
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run all rows and return the results; a backward loop first recomputes the forward steps (`recomputed`), if any."""
        env, rows = self._environment(operands)
        length = self.plan.length
        if self.plan.recomputed is not None:
            run_steps(self.plan.recomputed, env, rows, 0, length, keeps=True)
        run_steps(self.plan.steps, env, rows, 0, length)
        return collect_results(self.plan.steps, env, 0, length, operands[0])

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows from the carry and update it; save the old carry in `states`. Return the chunk's results."""
        if states is not None:
            states[chunk].copy_(carry)
        return self._run_rows(before, carry, *self._environment(operands), operands[0])

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Recompute the chunk's forward steps from `states`, then run its own steps, last to first; return its results.

        `before`: the number of rows that follow the chunk in the sequence, and so run before it.
        """
        env, rows = self._environment(operands)
        first = self.plan.length - before - self._num_rows(rows)
        if self.plan.recomputed is not None:
            if states is not None:
                restore_carry(self.plan.recomputed, env, first, states[chunk])
            run_steps(self.plan.recomputed, env, rows, first, first + self._num_rows(rows), keeps=True)
        return self._run_rows(first, carry, env, rows, operands[0])

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run the chunk's rows again, from the carry that was saved when it began; return its results."""
        env, rows = self._environment(operands)
        stop = before + self._num_rows(rows)
        restore_carry(self.plan.steps, env, before, states[chunk])
        run_steps(self.plan.steps, env, rows, before, stop)
        return collect_results(self.plan.steps, env, before, stop, operands[0])

    def resume_kept(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Any, ...]:
        """Run `resume`, and keep the values of all steps; return the results, followed by these values (as one `env`).

        Results of single steps are cloned, so that they share no memory with a kept value.
        """
        env, rows = self._environment(operands)
        stop = before + self._num_rows(rows)
        restore_carry(self.plan.steps, env, before, states[chunk])
        run_steps(self.plan.steps, env, rows, before, stop, keeps=True)
        values = collect_results(self.plan.steps, env, before, stop, operands[0])
        num_concat = len(self.plan.steps.concat_results)
        return (*values[:num_concat], *(final.clone() for final in values[num_concat:]), env)

    def retreat_from(self, before: int, after: int, carry: Tensor, kept: Env, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run the cotangents' steps on the values that `resume_kept` of the forward recurrence has kept."""
        env, rows = self._environment(operands)
        return self._run_rows(self.plan.length - before - self._num_rows(rows), carry, {**kept, **env}, rows, operands[0])

    def can_reuse_kept(self, forward: Recurrence) -> bool:
        """Return whether the forward recurrence runs exactly the steps that this one would recompute, on operands it has."""
        if not isinstance(forward, UnrolledRecurrence) or forward.plan.steps is not self.plan.recomputed:
            return False
        return set(forward.plan.operands) <= set(self.plan.operands)

    def _run_rows(self, first: int, carry: Tensor, env: Env, rows: Mapping[ValueId, Tensor], like: Tensor) -> tuple[Tensor, ...]:
        """Run the chunk's own steps, from the carry, and update it; return the chunk's results.

        `first`: the index in the sequence of the chunk's first row. `env`: the values so far, to which steps add theirs.
        `rows`: the operands with rows. `like`: a tensor whose device results without rows get.
        """
        steps, stop = self.plan.steps, first + self._num_rows(rows)
        start_boundary, end_boundary = (stop, first) if steps.reverse else (first, stop)
        restore_carry(steps, env, start_boundary, carry)
        run_steps(steps, env, rows, first, stop)
        values = collect_results(steps, env, first, stop, like)
        if stop > first:
            store_carry(steps, env, end_boundary, carry)
        return values

    def _environment(self, operands: tuple[Tensor, ...]) -> tuple[Env, dict[ValueId, Tensor]]:
        """Return (env, rows): the operands without rows, by the value that they are, and those with rows, by operand."""
        operand_of = dict(zip(self.plan.operands, operands, strict=True))
        env = {value: operand_of[index] for index, value in self.plan.shared.items()}
        return env, {index: operand_of[index] for index in self.plan.row_dims}

    def _num_rows(self, rows: Mapping[ValueId, Tensor]) -> int:
        """Return the number of rows of the chunk, given its operands with rows."""
        operand_index, dim = next(iter(self.plan.row_dims.items()))
        return rows[operand_index].shape[dim]


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


def restore_carry(steps: Steps, env: Env, boundary: int, carry: Tensor) -> None:
    """Copy the values that cross the boundary between steps `boundary` - 1 and `boundary` from the carry into `env`."""
    for slot in steps.crossing[boundary]:
        env[slot.value] = carry[slot.start : slot.stop].to(slot.dtype, copy=True).view(slot.shape)


def store_carry(steps: Steps, env: Env, boundary: int, carry: Tensor) -> None:
    """Copy the values that cross the boundary between steps `boundary` - 1 and `boundary` from `env` into the carry."""
    for slot in steps.crossing[boundary]:
        carry[slot.start : slot.stop].copy_(env[slot.value].reshape(-1))
