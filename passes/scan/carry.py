"""The carry of an unrolled loop: a slot for each value that crosses from row to row, and when values end.

An unrolled loop has a step for each row. The carry is a vector of bytes that step t passes to the next step; a *slot* is the
interval of its bytes that holds one value. Boundary b lies before step b, so a loop of n steps has boundaries 0 to n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

from torch import fx

from streamfx.ir.joint import is_tensor
from streamfx.ir.recurrence import CarrySlot, Instruction, Operation, StepValue, ValueId, aligned
from streamfx.node_meta import VALUE


class NoRecurrenceError(Exception):
    """The reason why an unrolled loop cannot run in chunks."""


def assign_carry_slots(
    lifetimes: Mapping[fx.Node, tuple[int, int]], value_ids: Mapping[fx.Node, ValueId], length: int, reverse: bool
) -> tuple[tuple[CarrySlot, ...], ...]:
    """Return, for each boundary between steps, the carry slots of the values that cross it (`Steps.crossing`).

    `lifetimes` maps a value to the first and the last boundary that it crosses; `length` is the number of steps. A loop in
    `reverse` runs from boundary `length` to 0. When a value ends, its slot is reused for a value of the same size and dtype.
    """
    crossing: list[list[CarrySlot]] = [[] for _ in range(length + 1)]
    carry_size = 0
    free_starts: dict[Any, list[int]] = defaultdict(list)  # by number of elements and dtype
    values_starting_at: dict[int, list[fx.Node]] = defaultdict(list)  # by boundary
    starts_freed_at: dict[int, list[tuple[Any, int]]] = defaultdict(list)  # by boundary: key of `free_starts`, start
    for value, (low, high) in lifetimes.items():
        values_starting_at[high if reverse else low].append(value)
    for boundary in range(length, -1, -1) if reverse else range(length + 1):
        for size, start in starts_freed_at.pop(boundary, ()):
            free_starts[size].append(start)
        for value in values_starting_at[boundary]:
            if not is_tensor(value):
                raise NoRecurrenceError("values that are not tensors cross from row to row")
            shape, dtype = tuple(value.meta[VALUE].shape), value.meta[VALUE].dtype
            size = prod(shape), dtype
            start = free_starts[size].pop() if free_starts[size] else aligned(carry_size, dtype.itemsize)
            slot = CarrySlot(start, start + prod(shape) * dtype.itemsize, shape, dtype, value_ids[value])
            carry_size = max(carry_size, start + prod(shape) * dtype.itemsize)
            low, high = lifetimes[value]
            for crossed in range(low, high + 1):
                crossing[crossed].append(slot)
            starts_freed_at[low - 1 if reverse else high + 1].append((size, start))
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
