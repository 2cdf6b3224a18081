"""The carry of an unrolled loop: its dtype, a slot for each value that crosses from row to row, and when values end.

An unrolled loop has a step for each row. The carry is one flat vector that step t passes to the next step; a *slot* is the
interval of its elements that holds one value. Boundary b lies before step b, so a loop of n steps has boundaries 0 to n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_tensor
from streamfx.ir.recurrence import CarrySlot, Instruction, Operation, StepValue, ValueId
from streamfx.node_meta import VALUE


class NoRecurrenceError(Exception):
    """The reason why an unrolled loop cannot run in chunks."""


def carry_type(values: Iterable[fx.Node]) -> torch.dtype:
    """Return the dtype of the carry vector, which represents the carried values of all (floating or bool) dtypes exactly.

    It is the widest of their dtypes; float32 for bfloat16 together with float16, or without floating-point values.
    Raise `NoRecurrenceError` if a value has another dtype, or is not a tensor.
    """
    dtypes = {value.meta[VALUE].dtype if is_tensor(value) else None for value in values}
    widest_first = [dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes]
    if dtypes - {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}:
        raise NoRecurrenceError("values that are not numbers cross from row to row")
    if not widest_first:
        return torch.float32
    has_both_half_types = {torch.bfloat16, torch.float16} <= dtypes  # neither represents the other exactly
    return torch.float32 if has_both_half_types and widest_first[0] is torch.bfloat16 else widest_first[0]


def assign_carry_slots(
    lifetimes: Mapping[fx.Node, tuple[int, int]], value_ids: Mapping[fx.Node, ValueId], length: int, reverse: bool
) -> tuple[tuple[CarrySlot, ...], ...]:
    """Return, for each boundary between steps, the carry slots of the values that cross it (`Steps.crossing`).

    `lifetimes` maps a value to the first and the last boundary that it crosses; `length` is the number of steps. A loop in
    `reverse` runs from boundary `length` to 0. When a value ends, its slot is reused for a value of the same size.
    """
    crossing: list[list[CarrySlot]] = [[] for _ in range(length + 1)]
    carry_size = 0
    free_starts: dict[int, list[int]] = defaultdict(list)  # by size, in elements
    values_starting_at: dict[int, list[fx.Node]] = defaultdict(list)  # by boundary
    slots_freed_at: dict[int, list[CarrySlot]] = defaultdict(list)  # by boundary
    for value, (low, high) in lifetimes.items():
        values_starting_at[high if reverse else low].append(value)
    for boundary in range(length, -1, -1) if reverse else range(length + 1):
        for slot in slots_freed_at.pop(boundary, ()):
            free_starts[slot.stop - slot.start].append(slot.start)
        for value in values_starting_at[boundary]:
            shape = tuple(value.meta[VALUE].shape)
            size = prod(shape)
            if free_starts[size]:
                start = free_starts[size].pop()
            else:
                start, carry_size = carry_size, carry_size + size
            slot = CarrySlot(value_ids[value], start, shape, value.meta[VALUE].dtype)
            low, high = lifetimes[value]
            for crossed in range(low, high + 1):
                crossing[crossed].append(slot)
            slots_freed_at[low - 1 if reverse else high + 1].append(slot)
    return tuple(map(tuple, crossing))


def dead_values(steps: list[list[Instruction]], live_values: set[ValueId], reverse: bool) -> tuple[tuple[ValueId, ...], ...]:
    """Return, for each step, the values that a loop can free after it: computed by a step, and used by no step that runs later.

    `live_values` (results of the loop, values in the carry) are omitted. With `reverse`, the last step runs first.
    """
    last_use: dict[ValueId, int] = {}
    execution_order = range(len(steps) - 1, -1, -1) if reverse else range(len(steps))
    computed: set[ValueId] = set()
    for step in execution_order:
        for instruction in steps[step]:
            computed.add(instruction.result_id)
            last_use[instruction.result_id] = step
            if isinstance(instruction, Operation):
                last_use.update(dict.fromkeys(value_ids_in((instruction.args, instruction.kwargs)), step))
    dead_after: list[list[ValueId]] = [[] for _ in steps]
    for value_id, step in last_use.items():
        if value_id in computed and value_id not in live_values:
            dead_after[step].append(value_id)
    return tuple(map(tuple, dead_after))


def value_ids_in(item: Any) -> list[ValueId]:
    """Return the identifiers of the values (`StepValue`) in nested arguments: `(StepValue(3), [StepValue(5), 1])` -> `[3, 5]`."""
    if isinstance(item, StepValue):
        return [item.value_id]
    if isinstance(item, Mapping):
        return [value_id for part in item.values() for value_id in value_ids_in(part)]
    return [value_id for part in item for value_id in value_ids_in(part)] if isinstance(item, (tuple, list)) else []
