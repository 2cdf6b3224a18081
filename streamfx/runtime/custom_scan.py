"""Stateful operators of packages and users, chunk by chunk: each chunk is a call of the operator on its rows.

A chunk receives the state that the chunk before it returned. The backward receives the gradient of the state from the
chunk after it, and the state with which its own chunk began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streamfx.ir.scan_schema import ALIGNED, StatefulPlan, StatefulResult, StateSlot, listed
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.select_row import nothing_to_add

Arguments = dict[str, Any]


class _Stateful(Recurrence):
    """A call of a stateful operator; its carry holds the bytes of the states."""

    carry_type = torch.uint8

    def __init__(self, plan: StatefulPlan) -> None:
        self.plan = plan
        self.name, self.axes, self.carried, self.block = plan.name, plan.axes, plan.carried, plan.block
        self.__name__ = self.__qualname__ = plan.name
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        outputs = called(self.plan, self._with_remade(dict(zip(self.plan.operands, operands, strict=True))))
        return tuple(outputs[part.number] for part in self.plan.results)

    def _with_remade(self, operands: Arguments) -> Arguments:
        return operands

    def _carried(
        self, before: int, after: int, chunk: int, carry: Tensor | None, states: Arguments, operands: Arguments
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows from the given states, and store the final states in the carry.

        Only the last chunk returns them.
        """
        plan, count = self.plan, rows_of(self.plan, operands)
        first = {slot.argument: states[slot.argument] for slot in plan.slots}
        outputs: Sequence[Any] | Mapping[int, Any]
        if count:
            outputs = called(plan, {**operands, **states}, count)
            left = {slot.result: outputs[slot.result] for slot in plan.slots}
            if carry is not None:
                store(plan, left, carry)
        else:
            outputs = of_no_rows(plan, {**operands, **states})
            left = {slot.result: first[slot.argument].clone() for slot in plan.slots}
        has_last = after == 0 and (count > 0 or (before == 0 and chunk == 0))
        return tuple(self._result(part, outputs, left, has_last) for part in plan.results)

    def _result(
        self, part: StatefulResult, outputs: Sequence[Any] | Mapping[int, Any], left: Mapping[int, Tensor], has_last: bool
    ) -> Tensor:
        """Return one result. Only the chunk with the last row returns the final state; others return an additive identity."""
        if part.number not in left:
            return outputs[part.number]
        state = left[part.number]
        return state.to(part.dtype) if has_last else nothing_to_add(state.shape, part.dtype, state.device)


class Forward(_Stateful):
    """The operator itself."""

    reverse = False

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        own = dict(zip(self.plan.operands, operands, strict=True))
        first = started(self.plan, own, carry) if before == 0 else restored(self.plan, carry)
        if states is not None:
            store(self.plan, {slot.result: first[slot.argument] for slot in self.plan.slots}, states[chunk])
        return self._carried(before, after, chunk, carry, first, own)

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(self.plan.operands, operands, strict=True))
        return self._carried(before, after, chunk, None, restored(self.plan, states[chunk]), own)

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the first to the last")


class Backward(_Stateful):
    """The backward of a call of the operator."""

    reverse = True
    needs_states = True

    def _with_remade(self, operands: Arguments) -> Arguments:
        """Add the saved values that have no rows, by recomputing the operator."""
        again, remade = self.plan.again, self.plan.remade
        operands = {**operands, **nothing(self.plan, operands)}
        if again is None or not remade:
            return operands
        outputs = called(again, operands)
        return {**operands, **{name: outputs[number] for name, number in remade.items()}}

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        assert states is not None and self.plan.again is not None
        own = {**dict(zip(self.plan.operands, operands, strict=True)), **restored(self.plan.again, states[chunk])}
        own |= nothing(self.plan, own)
        if self.plan.remade and (count := rows_of(self.plan, own)):
            outputs = called(self.plan.again, own, count)
            own |= {name: outputs[number] for name, number in self.plan.remade.items()}
        left = started(self.plan, own, carry) if before == 0 else restored(self.plan, carry)
        return self._carried(before, after, chunk, carry, left, own)

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the last to the first")

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the last to the first")


# -- calls


def called(plan: StatefulPlan, values: Mapping[str, Any], count: int | None = None) -> Sequence[Any]:
    """Call the operator on arguments that are laid out in memory as they were when they were traced.

    `count` is the number of rows of a chunk, or None for the original call over all rows.
    """
    arguments = {name: laid_out(value, plan.orders.get(name)) for name, value in values.items() if name in plan.takes}
    given = {name: value for name, value in plan.given.items() if name in plan.takes}
    given |= dict.fromkeys(plan.counts & plan.takes, rows_of(plan, values) if count is None else count)
    if count is not None:
        given |= plan.always
    return listed(plan.function(**{**given, **arguments}))


def laid_out(value: Any, order: tuple[int, ...] | None) -> Any:
    """Make a tensor dense in this order of dimensions, beginning at an address that kernels accept."""
    if not isinstance(value, Tensor):
        return value
    order = order or tuple(range(value.dim()))
    dense = value.permute(order).contiguous()
    if dense.storage_offset() * dense.element_size() % ALIGNED:
        dense = dense.clone()
    back = sorted(range(len(order)), key=order.__getitem__)
    return dense.permute(back)


def nothing(plan: StatefulPlan, values: Mapping[str, Any]) -> Arguments:
    """Return the operator's saved values that have no elements."""
    example = next(value for value in values.values() if isinstance(value, Tensor))
    return {name: example.new_empty(shape, dtype=dtype) for name, (shape, dtype) in plan.nothing.items()}


def of_no_rows(plan: StatefulPlan, values: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return results for no rows, without calling a kernel; sums over rows are zero."""
    example = next(value for value in values.values() if isinstance(value, Tensor))
    outputs, empty = of_a_block(plan, values), {}
    for part in plan.results:
        shape = list(outputs[part.number].shape)
        if part.rows is not None:
            shape[part.rows] = 0
        empty[part.number] = example.new_zeros(shape, dtype=part.dtype)
    return empty


def of_a_block(plan: StatefulPlan, values: Mapping[str, Any]) -> Sequence[Any]:
    """Return the operator's results on a block of rows, on the meta device. Few operators accept zero rows, even there."""

    def like(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = [plan.block if dim == plan.rows.get(name) else size for dim, size in enumerate(value.shape)]
        return value.new_empty(shape, device="meta")

    given = {name: like(name, value) for name, value in values.items()}
    if plan.again is not None and plan.remade:
        outputs = of_a_block(plan.again, values)
        given |= {name: outputs[number] for name, number in plan.remade.items()}
    return called(plan, given, plan.block)


def rows_of(plan: StatefulPlan, operands: Mapping[str, Any]) -> int:
    name, dim = next(iter(plan.rows.items()))
    count: int = operands[name].shape[dim]
    return count


# -- states


def started(plan: StatefulPlan, operands: Mapping[str, Any], carry: Tensor) -> Arguments:
    """Return the states before the first row: the given ones, or the zeros with which the carry was initialized."""
    nothing = restored(plan, carry)
    return {name: zeros if name in plan.absent else operands[name].to(zeros.dtype) for name, zeros in nothing.items()}


def restored(plan: StatefulPlan, carry: Tensor) -> Arguments:
    """Return copies of the states in a carry, because the carry will be overwritten."""
    return {slot.argument: _read(slot, carry) for slot in plan.slots}


def _read(slot: StateSlot, carry: Tensor) -> Tensor:
    if 0 in slot.shape:  # an empty slice may not be aligned for a view of this dtype
        return carry.new_empty(slot.shape, dtype=slot.dtype)
    return carry[slot.start : slot.stop].view(slot.dtype).view(slot.shape).clone()


def store(plan: StatefulPlan, left: Mapping[int, Tensor], carry: Tensor) -> None:
    for slot in (slot for slot in plan.slots if 0 not in slot.shape):
        part = carry[slot.start : slot.stop].view(slot.dtype)
        part.copy_(left[slot.result].reshape(-1))
