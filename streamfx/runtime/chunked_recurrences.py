"""Recurrences, chunk by chunk: a chunk runs its own rows from what the rows before it have left.

What crosses from one row to the next is kept in a `carry`, one vector. The loop of the forward half writes the carry with which
each chunk starts into `states` [chunks, ...]; the loop of the backward half makes a chunk's values again from there, and carries
the cotangents on from the last row to the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.ir.recurrence import Number, RecurrenceAxes, RecurrencePlan, RowRead, Steps, StepValue
from streamfx.ir.sizes import Size
from streamfx.runtime.select_row import nothing_to_add

Env = dict[Number, Any]


class Recurrence(ABC):
    """An operator of a graph whose rows follow one another, from the last to the first in `reverse`. Called with whole operands
    it runs all of them; in a loop a chunk of them, with so many rows `before` these, and `after` them, in its direction.
    """

    name: str
    axes: RecurrenceAxes
    reverse: bool
    carried: Size  # elements of the carry
    carry_type: torch.dtype
    block: int = 1  # chunks begin at multiples of so many rows
    needs_states: bool = False  # where it runs in reverse: the states with which chunks of the forward half began

    def __repr__(self) -> str:
        return f"streamfx.{self.name}"

    @property
    def carry_shape(self) -> tuple[Size, ...]:
        """Of what a loop keeps between two chunks."""
        return (self.carried,)

    @abstractmethod
    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """All rows."""

    @abstractmethod
    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """The chunk's rows, first to last; the carry moves on, and what it was is left in `states`."""

    @abstractmethod
    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """The chunk's rows, last to first; the carry moves on. `states` are those of the forward half, if it has some."""

    @abstractmethod
    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        """The chunk's rows again, first to last, from the state with which it started."""

    def goes_on_from(self, forward: Recurrence) -> bool:
        """Whether `retreat_from` can run with what another one's `resume_kept` leaves, which are all the steps that it needs."""
        return False

    def resume_kept(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Any, ...]:
        """As `resume`, with the values of all steps behind the results. No result shares its memory with one of these."""
        raise NotImplementedError("nothing goes on from its steps")

    def retreat_from(self, before: int, after: int, carry: Tensor, kept: Env, *operands: Tensor) -> tuple[Tensor, ...]:
        """As `retreat`, from the values of the forward half's steps in the same chunk."""
        raise NotImplementedError("it goes on from no other's steps")


class UnrolledRecurrence(Recurrence):
    """One that was written row by row: a chunk runs the operators of its own rows."""

    def __init__(self, plan: RecurrencePlan) -> None:
        self.plan = plan
        self.name, self.axes, self.reverse = plan.name, plan.axes, plan.own.reverse
        self.carried, self.carry_type = plan.own.carried, plan.own.dtype
        self.needs_states = plan.again is not None and plan.again.carried > 0
        self.__name__ = self.__qualname__ = plan.name
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        env, rows = self._begun(operands)
        length = self.plan.length
        if self.plan.again is not None:
            run(self.plan.again, env, rows, 0, length, keeps=True)
        run(self.plan.own, env, rows, 0, length)
        return results(self.plan.own, env, 0, length, operands[0])

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        if states is not None:
            states[chunk].copy_(carry)
        return self._carried(before, carry, *self._begun(operands), operands[0])

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """The chunk's rows of the forward half again, then the cotangents' steps."""
        env, rows = self._begun(operands)
        first = self.plan.length - before - self._count(rows)
        if self.plan.again is not None:
            if states is not None:
                restore(self.plan.again, env, first, states[chunk])
            run(self.plan.again, env, rows, first, first + self._count(rows), keeps=True)
        return self._carried(first, carry, env, rows, operands[0])

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        env, rows = self._begun(operands)
        stop = before + self._count(rows)
        restore(self.plan.own, env, before, states[chunk])
        run(self.plan.own, env, rows, before, stop)
        return results(self.plan.own, env, before, stop, operands[0])

    def resume_kept(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Any, ...]:
        env, rows = self._begun(operands)
        stop = before + self._count(rows)
        restore(self.plan.own, env, before, states[chunk])
        run(self.plan.own, env, rows, before, stop, keeps=True)
        made = results(self.plan.own, env, before, stop, operands[0])
        joined = len(self.plan.own.joins)
        return (*made[:joined], *(final.clone() for final in made[joined:]), env)

    def retreat_from(self, before: int, after: int, carry: Tensor, kept: Env, *operands: Tensor) -> tuple[Tensor, ...]:
        env, rows = self._begun(operands)
        return self._carried(self.plan.length - before - self._count(rows), carry, {**kept, **env}, rows, operands[0])

    def goes_on_from(self, forward: Recurrence) -> bool:
        if not isinstance(forward, UnrolledRecurrence) or forward.plan.own is not self.plan.again:
            return False
        return set(forward.plan.operands) <= set(self.plan.operands)

    def _carried(self, first: int, carry: Tensor, env: Env, rows: Mapping[Number, Tensor], like: Tensor) -> tuple[Tensor, ...]:
        own, stop = self.plan.own, first + self._count(rows)
        begin, end = (stop, first) if own.reverse else (first, stop)
        restore(own, env, begin, carry)
        run(own, env, rows, first, stop)
        made = results(own, env, first, stop, like)
        if stop > first:
            store(own, env, end, carry)
        return made

    def _begun(self, operands: tuple[Tensor, ...]) -> tuple[Env, dict[Number, Tensor]]:
        by_number = dict(zip(self.plan.operands, operands, strict=True))
        env = {value: by_number[number] for number, value in self.plan.given.items()}
        return env, {number: by_number[number] for number in self.plan.rows}

    def _count(self, rows: Mapping[Number, Tensor]) -> int:
        number, dim = next(iter(self.plan.rows.items()))
        return rows[number].shape[dim]


def run(steps: Steps, env: Env, rows: Mapping[Number, Tensor], first: int, stop: int, keeps: bool = False) -> None:
    """Run steps [first, stop); values without further use are dropped unless the other half's steps need them."""

    def value(item: Any) -> Any:
        return env[item.number] if isinstance(item, StepValue) else item

    for step in range(stop - 1, first - 1, -1) if steps.reverse else range(first, stop):
        for item in steps.steps[step]:
            if isinstance(item, RowRead):
                env[item.made] = rows[item.operand].select(item.dim, item.step - first)
            else:
                args, kwargs = pytree.tree_map(value, (item.args, dict(item.kwargs)))
                env[item.made] = item.target(*args, **kwargs)
        if steps.dead and not keeps:
            for number in steps.dead[step]:
                env.pop(number, None)


def results(steps: Steps, env: Env, first: int, stop: int, like: Tensor) -> tuple[Tensor, ...]:
    """Rows [first, stop) of what the steps make, and what single steps leave behind."""
    made: list[Tensor] = []
    for join in steps.joins:
        rows = [env[number] for number in join.values[first:stop]]
        empty = like.new_empty((*join.shape[: join.dim], 0, *join.shape[join.dim + 1 :]), dtype=join.dtype)
        made.append(torch.stack(rows, join.dim) if rows else empty)
    for final in steps.finals:
        is_made = first <= final.step < stop
        made.append(env[final.value] if is_made else nothing_to_add(final.shape, final.dtype, like.device))
    return tuple(made)


def restore(steps: Steps, env: Env, boundary: int, carry: Tensor) -> None:
    for slot in steps.crossing[boundary]:
        env[slot.value] = carry[slot.start : slot.stop].to(slot.dtype, copy=True).view(slot.shape)


def store(steps: Steps, env: Env, boundary: int, carry: Tensor) -> None:
    for slot in steps.crossing[boundary]:
        carry[slot.start : slot.stop].copy_(env[slot.value].reshape(-1))
