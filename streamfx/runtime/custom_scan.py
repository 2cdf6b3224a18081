"""Stateful operators of packages and users, chunk by chunk: each chunk is a call of the operator on its rows.

A chunk receives the state that the chunk before it returned. The backward receives the gradient of the state from the
chunk after it, and the state with which its own chunk began.

A `StatefulPlan` is one call of such an operator in a graph; values (operands, constants, states) are keyed by the name of the
operator's argument. A slot of the plan is the place of one state in the carry, a vector of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.ir.scan_schema import ALIGNED, StatefulPlan, listed
from streamfx.runtime.chunked_recurrences import Chunk, Recurrence
from streamfx.runtime.select_row import additive_identity
from streamfx.torch_private import SCAN, FakeTensor

Arguments = dict[str, Any]


class StatefulRecurrence(Recurrence):
    """A call of a stateful operator, or of its backward; its carry holds the bytes of the states, or of their gradients."""

    def __init__(self, plan: StatefulPlan) -> None:
        """Wrap the plan of one call."""
        super().__init__(plan.name, plan.axes)
        self.plan, self.reverse, self.carry_size, self.block = plan, plan.reverse, plan.carry_size, plan.block
        self.needs_states = plan.forward_plan is not None

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Call the operator on all rows; return the results that the graph uses."""
        values = self._with_saved(dict(zip(self.plan.operands, operands, strict=True)), None)
        outputs = call_operator(self.plan, values)
        return tuple(outputs[result.index] for result in self.plan.results)

    def start(self, carry: Tensor, operands: tuple[Tensor, ...]) -> None:
        """Write the states before the first row to the carry; states that the call omits stay zeros."""
        values = dict(zip(self.plan.operands, operands, strict=True))
        for slot in self.plan.slots:
            if slot.argument not in self.plan.absent:
                slot.write(carry, values[slot.argument])

    def run_chunk(self, chunk: Chunk, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Call the operator on the chunk's rows and states, and store the final states in the next carry.

        Only the chunk that runs the last row returns final states as results; others return an additive identity, because
        the loop adds over chunks. A chunk without rows passes its states on.
        """
        plan = self.plan
        states = states_from_carry(plan, chunk.carry)
        forward_states = {} if plan.forward_plan is None else states_from_carry(plan.forward_plan, chunk.forward_carry)
        values = {**dict(zip(plan.operands, operands, strict=True)), **forward_states, **states}
        count = num_rows(plan, values)
        values = self._with_saved(values, count)
        outputs: Sequence[Any] | Mapping[int, Any]
        if count or not plan.is_kernel:
            outputs = call_operator(plan, values, count)
            final_states = {slot.result: outputs[slot.result] for slot in plan.slots}
        else:
            outputs = results_of_no_rows(plan, values)
            final_states = {slot.result: states[slot.argument] for slot in plan.slots}
        if chunk.next_carry is not None:
            for slot in plan.slots:
                slot.write(chunk.next_carry, final_states[slot.result])
        has_last = chunk.after == 0 and (count > 0 or (chunk.before == 0 and chunk.chunk_index == 0))
        results: list[Tensor] = []
        for result in plan.results:
            state = final_states.get(result.index)
            if state is None:
                results.append(outputs[result.index])
            elif has_last:
                results.append(state.to(result.dtype))
            else:
                results.append(additive_identity(state.shape, result.dtype, state.device))
        return tuple(results)

    def _with_saved(self, values: Arguments, count: int | None) -> Arguments:
        """Return the values, and saved values of the forward that are not operands; a backward may need them.

        They have no elements, or are recomputed by the forward operator: `recomputed_per_chunk` has the index of its result.
        `count`: see `call_operator`.
        """
        values = {**values, **empty_saved(self.plan, values)}
        forward_plan, recomputed = self.plan.forward_plan, self.plan.recomputed_per_chunk
        if forward_plan is None or not recomputed or count == 0:
            return values
        outputs = call_operator(forward_plan, values, count)
        return {**values, **{name: outputs[index] for name, index in recomputed.items()}}


class StepLoop:
    """The function of PyTorch's `scan`: run `combine` on each row (along dimension 0) in order.

    `combine(*carry, *rows, *shared)` returns the next carry, and a row of each result. `arguments`: the names of the carried
    values, of the operands with rows, and of the operands that all rows share. `row_results`: shape and dtype of a row of
    each result. `step`: the graph of `combine`, a method of a graph module.
    """

    def __init__(
        self,
        combine: Callable[..., Sequence[Tensor]],
        arguments: tuple[Sequence[str], Sequence[str], Sequence[str]],
        row_results: Sequence[tuple[tuple[int, ...], torch.dtype]],
        reverse: bool,
    ) -> None:
        """Set the function, the names of its arguments, and the direction."""
        self.combine, self.arguments, self.row_results, self.reverse = combine, arguments, row_results, reverse
        self.step: fx.Graph = combine.__self__.graph  # type: ignore[attr-defined]

    def __call__(self, **operands: Tensor) -> Sequence[Tensor]:
        """Return the carry after the last row, and the rows of each result, stacked."""
        carry, rows, shared = ([operands[name] for name in names] for names in self.arguments)
        if any(isinstance(operand, FakeTensor) for operand in operands.values()):
            return SCAN(self.combine, carry, rows, shared)  # only shapes are needed: torch's scan traces one row
        num_carried, steps = len(carry), list[Sequence[Tensor]]()
        for step in reversed(range(len(rows[0]))) if self.reverse else range(len(rows[0])):
            result = self.combine(*carry, *(operand.select(0, step) for operand in rows), *shared)
            carry = list(result[:num_carried])
            steps.append(result[num_carried:])
        if self.reverse:
            steps.reverse()
        if not steps:
            return [*carry, *(rows[0].new_empty((0, *shape), dtype=dtype) for shape, dtype in self.row_results)]
        return [*carry, *map(torch.stack, zip(*steps, strict=True))]


# -- calls


def call_operator(plan: StatefulPlan, values: Mapping[str, Any], count: int | None = None) -> Sequence[Any]:
    """Call the operator, a kernel with the arguments laid out in memory as in the trace; return its results as a sequence.

    `values`: arguments by name, possibly more than it has. `count` is the number of rows of a chunk, or None for the original
    call over all rows.
    """
    arguments = {name: value for name, value in values.items() if name in plan.argument_names}
    if plan.is_kernel:
        arguments = {name: with_dimension_order(value, plan.orders.get(name)) for name, value in arguments.items()}
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


def states_from_carry(plan: StatefulPlan, carry: Tensor | None) -> Arguments:
    """Return copies of the states in a carry, by argument."""
    assert carry is not None
    return {slot.argument: slot.read(carry) for slot in plan.slots}
