"""Sample calls of recurrences: y_t = a_t * y_{t-1} + x_t, of which the last row is a result as well; first y is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamfx.ir.recurrence import (
    CarrySlot,
    ConcatResult,
    Instruction,
    Operation,
    RecurrenceAxes,
    RecurrencePlan,
    RowRead,
    ScanPlan,
    SingleStepResult,
    Steps,
    StepValue,
    TreePlan,
)
from streamfx.runtime.associative import Associative, AssociativeBackward, bytes_of_blocks
from streamfx.runtime.chunked_recurrences import UnrolledRecurrence
from streamfx.runtime.scan import ChunkedScan
from tests.support.combines import affine, number_of
from tests.support.samples.registry import Sizes, sample

aten = torch.ops.aten
FIRST = 0


@sample(UnrolledRecurrence)
def decayed_sum(s: Sizes) -> tuple[Any, ...]:
    return UnrolledRecurrence(plan(s)), s.draw(s.b, s.t, s.d), s.draw(s.b, s.t, s.d), s.draw(s.b, s.d)


def plan(s: Sizes) -> RecurrencePlan:
    """Operands 1 and 2 have rows; step t makes the values 4 t + 1 to 4 t + 4."""
    steps: list[tuple[Instruction, ...]] = []
    for t in range(s.t):
        decay, x, product, made = range(4 * t + 1, 4 * t + 5)
        before = StepValue(made - 4 if t else FIRST)
        steps.append(
            (
                RowRead(decay, 1, 1, t),
                RowRead(x, 2, 1, t),
                Operation(product, aten.mul.Tensor, (StepValue(decay), before), {}),
                Operation(made, aten.add.Tensor, (StepValue(product), StepValue(x)), {}),
            )
        )
    dtype, row = torch.float64, (s.b, s.d)
    crossing = ((), *((CarrySlot(4 * t, 0, row, dtype),) for t in range(1, s.t)), ())
    join = ConcatResult(tuple(4 * t + 4 for t in range(s.t)), 1, (s.b, s.t, s.d), dtype)
    own = Steps(tuple(steps), crossing, (join,), (SingleStepResult(4 * s.t, s.t - 1, row, dtype),), dtype, reverse=False)
    rows, state = ((1,), (0,), (2,)), ((1,), (2,))
    return RecurrencePlan(
        "decayed_sum",
        s.t,
        own,
        None,
        (1, 2, -1),
        {1: 1, 2: 1},
        {-1: FIRST},
        RecurrenceAxes((rows, rows, state), (rows, state), 0),
    )


@sample(ChunkedScan)
def scanned_sum(s: Sizes) -> tuple[Any, ...]:
    """The same as one operator: a state, two operands with rows, and what all rows are given."""
    return ChunkedScan(scan_plan(s)), s.draw(s.b, s.d), s.draw(s.t, s.b, s.d), s.draw(s.t, s.b, s.d), s.draw(s.d)


def scan_plan(s: Sizes) -> ScanPlan:
    def step(state: Tensor, decay: Tensor, row: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = decay * state * weight + row
        return state, state * row

    row = ((s.b, s.d), torch.float64)
    rows, state = ((0,), (1,), (2,)), ((1,), (2,))
    axes = RecurrenceAxes((state, rows, rows, ((2,),)), (state, rows), 0)
    return ScanPlan("scanned_sum", step, (row,), (0,), 2, (row,), False, axes)


@sample(Associative)
def combined_rows(s: Sizes) -> tuple[Any, ...]:
    """Two leaves, and what all rows are given."""
    return Associative(tree_plan(s, (0, 1))), s.draw(s.t, s.b, s.d), s.draw(s.t, s.b, s.d), s.draw(s.d)


@sample(AssociativeBackward)
def gradients_of_combined_rows(s: Sizes) -> tuple[Any, ...]:
    """Of one result there is no gradient."""
    return AssociativeBackward(tree_plan(s, (1, 2), absent=0)), *(s.draw(s.t, s.b, s.d) for _ in range(3)), s.draw(s.d)


def tree_plan(s: Sizes, results: tuple[int, ...], absent: int | None = None) -> TreePlan:
    rows, given = ((0,), (1,), (2,)), ((2,),)
    row = [s.draw(s.b, s.d) for _ in range(4)]
    operands = (rows, rows, given)
    return TreePlan(
        "combined_rows",
        number_of(affine, *row, s.draw(s.d)),
        (torch.float64, torch.float64),
        s.t,
        bytes_of_blocks([(s.b, s.d), (s.b, s.d)], [torch.float64, torch.float64], s.t),
        results,
        RecurrenceAxes(operands if absent is None else (rows, *operands), tuple(operands[number] for number in results), 0),
        frozenset() if absent is None else frozenset({absent}),
    )
