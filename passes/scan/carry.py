"""The carry of an unrolled loop: its dtype, a slot for each value that crosses from row to row, and when values end."""

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
    """Return the widest dtype of the carried values, which represents narrower numbers exactly."""
    dtypes = {value.meta[VALUE].dtype if is_tensor(value) else None for value in values}
    wide = [dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes]
    if dtypes - {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}:
        raise NoRecurrenceError("values that are not numbers cross from row to row")
    mixed = {torch.bfloat16, torch.float16} <= dtypes
    return torch.float32 if mixed and wide[0] not in (torch.float64, torch.float32) else (wide or [torch.float32])[0]


def assign_carry_slots(
    lifetimes: Mapping[fx.Node, tuple[int, int]], value_ids: Mapping[fx.Node, ValueId], length: int, reverse: bool
) -> tuple[tuple[CarrySlot, ...], ...]:
    """Return the slots of the carry at each boundary; the memory of a value that ends is reused."""
    crossing: list[list[CarrySlot]] = [[] for _ in range(length + 1)]
    free: dict[int, list[int]] = defaultdict(list)
    ending: dict[int, list[CarrySlot]] = defaultdict(list)
    end = 0
    starting: dict[int, list[fx.Node]] = defaultdict(list)
    for value, (low, high) in lifetimes.items():
        starting[high if reverse else low].append(value)
    for boundary in range(length, -1, -1) if reverse else range(length + 1):
        for slot in ending.pop(boundary, ()):
            free[slot.stop - slot.start].append(slot.start)
        for value in starting[boundary]:
            shape, size = tuple(value.meta[VALUE].shape), prod(value.meta[VALUE].shape)
            if free[size]:
                start = free[size].pop()
            else:
                start, end = end, end + size
            slot = CarrySlot(value_ids[value], start, shape, value.meta[VALUE].dtype)
            low, high = lifetimes[value]
            for crossed in range(low, high + 1):
                crossing[crossed].append(slot)
            ending[low - 1 if reverse else high + 1].append(slot)
    return tuple(map(tuple, crossing))


def dead_values(steps: list[list[Instruction]], live_values: set[ValueId], reverse: bool) -> tuple[tuple[ValueId, ...], ...]:
    """Return, for each step, the values that no later step uses, except `live_values`."""
    last: dict[ValueId, int] = {}
    positions = range(len(steps) - 1, -1, -1) if reverse else range(len(steps))
    defined: set[ValueId] = set()
    for step in positions:
        for item in steps[step]:
            defined.add(item.result_id)
            last[item.result_id] = step
            if isinstance(item, Operation):
                last.update(dict.fromkeys(value_ids_in((item.args, item.kwargs)), step))
    dead: list[list[ValueId]] = [[] for _ in steps]
    for value_id, step in last.items():
        if value_id in defined and value_id not in live_values:
            dead[step].append(value_id)
    return tuple(map(tuple, dead))


def value_ids_in(item: Any) -> list[ValueId]:
    """Return the identifiers of the values in an operator's arguments."""
    if isinstance(item, StepValue):
        return [item.value_id]
    if isinstance(item, Mapping):
        return [value_id for part in item.values() for value_id in value_ids_in(part)]
    return [value_id for part in item for value_id in value_ids_in(part)] if isinstance(item, (tuple, list)) else []
