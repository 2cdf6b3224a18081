"""Stateful operators of packages and users, chunk by chunk: each chunk is a call of the operator on its rows.

A chunk receives the state that the chunk before it returned. The backward receives the gradient of the state from the
chunk after it, and the state with which its own chunk began.

A `StatefulPlan` is one call of such an operator in a graph; values (operands, constants, states) are keyed by the name of the
operator's argument. A `carry` is a vector of bytes in which a loop holds all states between two chunks; a slot of the plan is
the place of one state there. `states` [chunks, ...] holds the carries with which the forward loop's chunks began, and `chunk` is
a chunk's index there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streamfx.ir.scan_schema import ALIGNED, StatefulPlan, StatefulResult, StateSlot, listed
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.select_row import additive_identity

Arguments = dict[str, Any]


class _Stateful(Recurrence):
    """A call of a stateful operator, or of its backward; its carry holds the bytes of the states, or of their gradients."""

    carry_type = torch.uint8

    def __init__(self, plan: StatefulPlan) -> None:
        """Wrap the plan of one call; fx prints this operator of the graph as `__name__`.

        `axes`: the axis labels of operands and results; `carry_size`: bytes of the carry; `block`: chunks begin at multiples of
        this many rows.
        """
        self.plan = plan
        self.name, self.axes, self.carry_size, self.block = plan.name, plan.axes, plan.carry_size, plan.block
        self.__name__ = self.__qualname__ = plan.name
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Call the operator on all rows; return the results that the graph uses."""
        outputs = call_operator(self.plan, self._with_recomputed(dict(zip(self.plan.operands, operands, strict=True))))
        return tuple(outputs[result.index] for result in self.plan.results)

    def _with_recomputed(self, operands: Arguments) -> Arguments:
        """Return the operands and the forward's saved values that are not among them; only `Backward` needs any."""
        return operands

    def _run_chunk(
        self, before: int, after: int, chunk: int, carry: Tensor | None, states: Arguments, operands: Arguments
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows from `states`, and store the final states in the carry (if not None); return the chunk's results.

        `before` and `after`: the number of rows that run before and after the chunk's. Only the chunk that runs the last row
        returns final states as results. A chunk without rows passes its states on.
        """
        plan = self.plan
        count = num_rows(plan, operands)
        states_before = {slot.argument: states[slot.argument] for slot in plan.slots}
        outputs: Sequence[Any] | Mapping[int, Any]
        if count:
            outputs = call_operator(plan, {**operands, **states}, count)
            final_states = {slot.result: outputs[slot.result] for slot in plan.slots}
            if carry is not None:
                store_states(plan, final_states, carry)
        else:
            outputs = results_of_no_rows(plan, {**operands, **states})
            final_states = {slot.result: states_before[slot.argument].clone() for slot in plan.slots}
        has_last = after == 0 and (count > 0 or (before == 0 and chunk == 0))
        return tuple(self._result(result, outputs, final_states, has_last) for result in plan.results)

    def _result(
        self,
        result: StatefulResult,
        outputs: Sequence[Any] | Mapping[int, Any],
        final_states: Mapping[int, Tensor],
        has_last: bool,
    ) -> Tensor:
        """Return one result; `outputs` and `final_states` are keyed by the index of the operator's result.

        Only the chunk with the last row (`has_last`) returns the final state; others return an additive identity, because
        the loop adds over chunks.
        """
        if result.index not in final_states:
            return outputs[result.index]
        state = final_states[result.index]
        return state.to(result.dtype) if has_last else additive_identity(state.shape, result.dtype, state.device)


class Forward(_Stateful):
    """The operator itself."""

    reverse = False

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's rows from the states in the carry (the first chunk: from the initial states); return its results.

        The carry is updated. If `states` is not None, save the chunk's initial states there first.
        """
        values = dict(zip(self.plan.operands, operands, strict=True))
        states_before = initial_states(self.plan, values, carry) if before == 0 else states_from_carry(self.plan, carry)
        if states is not None:
            store_states(self.plan, {slot.result: states_before[slot.argument] for slot in self.plan.slots}, states[chunk])
        return self._run_chunk(before, after, chunk, carry, states_before, values)

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        """Recompute the chunk's rows from the states that were saved when the chunk began."""
        values = dict(zip(self.plan.operands, operands, strict=True))
        return self._run_chunk(before, after, chunk, None, states_from_carry(self.plan, states[chunk]), values)

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the first to the last")


class Backward(_Stateful):
    """The backward of a call of the operator, whose states are the gradients of the forward's states."""

    reverse = True
    needs_states = True

    def _with_recomputed(self, operands: Arguments) -> Arguments:
        """Return the operands and the forward's saved values that are not among them, by calling the forward operator again.

        The plan names them, with the index of the forward's result: `recomputed_per_chunk`.
        """
        forward_plan, recomputed = self.plan.forward_plan, self.plan.recomputed_per_chunk
        operands = {**operands, **empty_saved(self.plan, operands)}
        if forward_plan is None or not recomputed:
            return operands
        outputs = call_operator(forward_plan, operands)
        return {**operands, **{name: outputs[index] for name, index in recomputed.items()}}

    def retreat(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the chunk's backward from the states before it, and the cotangents of the states after it; return its results.

        The states come from `states[chunk]`, the cotangents from the carry, which is updated. Saved values that the plan
        does not store are recomputed by the forward operator.
        """
        assert states is not None and self.plan.forward_plan is not None
        values = {
            **dict(zip(self.plan.operands, operands, strict=True)),
            **states_from_carry(self.plan.forward_plan, states[chunk]),
        }
        values |= empty_saved(self.plan, values)
        if self.plan.recomputed_per_chunk and (count := num_rows(self.plan, values)):
            outputs = call_operator(self.plan.forward_plan, values, count)
            values |= {name: outputs[index] for name, index in self.plan.recomputed_per_chunk.items()}
        cotangents = initial_states(self.plan, values, carry) if before == 0 else states_from_carry(self.plan, carry)
        return self._run_chunk(before, after, chunk, carry, cotangents, values)

    def advance(
        self, before: int, after: int, carry: Tensor, states: Tensor | None, chunk: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the last to the first")

    def resume(self, before: int, after: int, states: Tensor, chunk: int, *operands: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("its rows go from the last to the first")


# -- calls


def call_operator(plan: StatefulPlan, values: Mapping[str, Any], count: int | None = None) -> Sequence[Any]:
    """Call the operator, with the arguments laid out in memory as in the trace; return its results as a sequence.

    `values`: arguments by name, possibly more than it has. `count` is the number of rows of a chunk, or None for the original
    call over all rows.
    """
    arguments = {
        name: with_dimension_order(value, plan.orders.get(name)) for name, value in values.items() if name in plan.argument_names
    }
    constants = {name: value for name, value in plan.constants.items() if name in plan.argument_names}
    constants |= dict.fromkeys(plan.counts & plan.argument_names, num_rows(plan, values) if count is None else count)
    if count is not None:
        constants |= plan.always
    return listed(plan.function(**{**constants, **arguments}))


def with_dimension_order(value: Any, order: tuple[int, ...] | None) -> Any:
    """Return a tensor whose memory is dense in this order of dimensions (None: contiguous), at an aligned address.

    Other values are returned unchanged. The shape does not change: (1, 0) gives a matrix stored by columns.
    """
    if not isinstance(value, Tensor):
        return value
    order = order or tuple(range(value.dim()))
    dense = value.permute(order).contiguous()
    if dense.storage_offset() * dense.element_size() % ALIGNED:
        dense = dense.clone()
    inverse_order = sorted(range(len(order)), key=order.__getitem__)
    return dense.permute(inverse_order)


def empty_saved(plan: StatefulPlan, values: Mapping[str, Any]) -> Arguments:
    """Return, by name, the forward's saved values that have no elements, which no graph needs to store.

    The plan has their shapes; `values` only gives the device.
    """
    example = next(value for value in values.values() if isinstance(value, Tensor))
    return {name: example.new_empty(shape, dtype=dtype) for name, (shape, dtype) in plan.empty_results.items()}


def results_of_no_rows(plan: StatefulPlan, values: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return the results of an operator on zero rows, by index, without calling a kernel; sums over rows are zero."""
    example = next(value for value in values.values() if isinstance(value, Tensor))
    outputs, empty = meta_results_of_block(plan, values), {}
    for result in plan.results:
        shape = list(outputs[result.index].shape)
        if result.row_dim is not None:
            shape[result.row_dim] = 0
        empty[result.index] = example.new_zeros(shape, dtype=result.dtype)
    return empty


def meta_results_of_block(plan: StatefulPlan, values: Mapping[str, Any]) -> Sequence[Any]:
    """Return the operator's results on one block of rows on the meta device, to learn the shapes of results on zero rows.

    Few operators accept zero rows, even on the meta device.
    """

    def meta_like(name: str, value: Any) -> Any:
        """Return a meta tensor like the argument `name`, with one block (`plan.block` rows) in place of its rows."""
        if not isinstance(value, Tensor):
            return value
        shape = [plan.block if dim == plan.row_dims.get(name) else size for dim, size in enumerate(value.shape)]
        return value.new_empty(shape, device="meta")

    meta_values = {name: meta_like(name, value) for name, value in values.items()}
    if plan.forward_plan is not None and plan.recomputed_per_chunk:
        outputs = meta_results_of_block(plan.forward_plan, values)
        meta_values |= {name: outputs[index] for name, index in plan.recomputed_per_chunk.items()}
    return call_operator(plan, meta_values, plan.block)


def num_rows(plan: StatefulPlan, operands: Mapping[str, Any]) -> int:
    """Return the number of rows of the operands, by the first operand that has rows."""
    name, dim = next(iter(plan.row_dims.items()))
    count: int = operands[name].shape[dim]
    return count


# -- states


def initial_states(plan: StatefulPlan, operands: Mapping[str, Any], carry: Tensor) -> Arguments:
    """Return the states before the first row, by argument: operands, or, if the call has none, the zeros of the new carry."""
    initial = states_from_carry(plan, carry)
    return {name: zeros if name in plan.absent else operands[name].to(zeros.dtype) for name, zeros in initial.items()}


def states_from_carry(plan: StatefulPlan, carry: Tensor) -> Arguments:
    """Return copies of the states in a carry, by argument, because the carry will be overwritten."""
    return {slot.argument: _state_from_carry(slot, carry) for slot in plan.slots}


def _state_from_carry(slot: StateSlot, carry: Tensor) -> Tensor:
    """Return a copy of one state in the carry."""
    if 0 in slot.shape:  # an empty slice may not be aligned for a view of this dtype
        return carry.new_empty(slot.shape, dtype=slot.dtype)
    return carry[slot.start : slot.stop].view(slot.dtype).view(slot.shape).clone()


def store_states(plan: StatefulPlan, final_states: Mapping[int, Tensor], carry: Tensor) -> None:
    """Copy states into the bytes of the carry; `final_states` is keyed by the index of the operator's result."""
    for slot in (slot for slot in plan.slots if 0 not in slot.shape):
        destination = carry[slot.start : slot.stop].view(slot.dtype)
        destination.copy_(final_states[slot.result].reshape(-1))
