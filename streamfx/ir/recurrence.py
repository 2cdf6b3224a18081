"""Plans of recurrences: operators that pass a state from row to row. In an unrolled loop, each operator belongs to a step:

    for t in range(T):                          step t:  a_t = a[:, t];  x_t = x[:, t]
        state = a[:, t] * state + x[:, t]                state_t = a_t * state_{t-1} + x_t
        y[:, t] = state.tanh()                           y_t = state_t.tanh()
                                                crossing from step t to step t + 1: state_t

Steps may differ: a chunk of rows runs the operators of its rows unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from streamfx.ir.signature import Letter, LetterShape
from streamfx.ir.sizes import Size

ROWS: Letter = 0  # the axis of the steps
Shaped: TypeAlias = "tuple[Sequence[Size], int | None]"  # sizes, and the dimension of rows, if there is one
ValueId: TypeAlias = int  # identifies a value of the steps, or an operand


@dataclass(frozen=True)
class StepValue:
    """Represents a value of the steps in the arguments of an `Operation`."""

    value_id: ValueId


@dataclass(frozen=True)
class RowRead:
    """Read the row of one step from an operand."""

    result_id: ValueId
    operand: ValueId
    dim: int
    step: int


@dataclass(frozen=True)
class Operation:
    """Apply an operator to constants and to values of the steps (`StepValue`)."""

    result_id: ValueId
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Instruction: TypeAlias = "RowRead | Operation"


@dataclass(frozen=True)
class CarrySlot:
    """A value that a step passes to the next one, and the elements of the carry that hold it: [start, stop)."""

    value: ValueId
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The end of the slot in the carry, in elements."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class ConcatResult:
    """A result that concatenates values of the steps along `dim`."""

    values: tuple[ValueId, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SingleStepResult:
    """A result that one step computes. In a loop it is a sum to which the other chunks add zeros."""

    value: ValueId
    step: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Steps:
    """The operators of all steps, of the forward graph or of the backward graph.

    `steps[t]`: the operators of step t.
    `crossing[b]`: the values that the steps before b pass to step b and later steps; if `reverse`, the values that step b
    and later steps pass to the steps before b.
    `dead_after[t]`: the values that no operator uses after step t.
    """

    steps: tuple[tuple[Instruction, ...], ...]
    crossing: tuple[tuple[CarrySlot, ...], ...]
    concat_results: tuple[ConcatResult, ...]
    single_step_results: tuple[SingleStepResult, ...]
    dtype: torch.dtype
    reverse: bool
    dead_after: tuple[tuple[ValueId, ...], ...] = ()

    @property
    def carry_size(self) -> int:
        """The number of elements of the carry."""
        return max((slot.stop for slots in self.crossing for slot in slots), default=0)


@dataclass(frozen=True)
class RecurrenceAxes:
    """The letters (axis labels) of a recurrence's operands and results; `rows` labels the steps."""

    operands: tuple[LetterShape, ...]
    results: tuple[LetterShape, ...]
    rows: Letter


def separate_axes(operands: Iterable[Shaped], results: Iterable[Shaped]) -> RecurrenceAxes:
    """Return axes with a separate letter for each dimension but rows: operations along the other dimensions are opaque."""
    letters = count(ROWS + 1)

    def label(sizes: Sequence[Size], row_dim: int | None) -> LetterShape:
        """Return letters for the dimensions of one tensor: `ROWS` for dimension `row_dim`, none for size 1."""
        return tuple((ROWS,) if dim == row_dim else (next(letters),) if size != 1 else () for dim, size in enumerate(sizes))

    return RecurrenceAxes(tuple(label(*item) for item in operands), tuple(label(*item) for item in results), ROWS)


CarryIntervals: TypeAlias = "Sequence[tuple[int, int | None]]"  # intervals (start, stop) of a carry


@dataclass(frozen=True)
class Truncation:
    """The truncation of the gradients of states, which reach back `rows` rows, rounded up to chunks.

    `adjoints[n]` has the intervals of the carry after n rows that hold gradients of states; a single entry applies to all
    n. Other carried values are not truncated: sums of gradients over rows, and forward values.
    """

    rows: int
    adjoints: Sequence[CarryIntervals]


@dataclass(frozen=True)
class RecurrencePlan:
    """An unrolled loop as one operator.

    `steps`: the operators that the loop runs.
    `recomputed`: the forward steps that a backward loop recomputes before its own; None for a forward loop.
    `operands`: identifies each operand, in order.
    `rows`: the step dimension of each operand that has rows.
    `shared`: the value of the steps that each operand without rows holds.
    """

    name: str
    length: int
    steps: Steps
    recomputed: Steps | None
    operands: tuple[ValueId, ...]
    rows: Mapping[ValueId, int]
    shared: Mapping[ValueId, ValueId]
    axes: RecurrenceAxes


@dataclass(frozen=True)
class ScanPlan:
    """A scan over rows as one operator: `combine(*carry, *rows, *shared)` returns the next carry, and a row of each result.

    The operands are the initial carry, then operands with rows (along dimension 0), then operands that all rows share. The
    results are the final values of the carry components `final_carries`, then rows (along dimension 0).

    `carry`, `row_results`: shape and dtype of each carry component, and of a row of each result.
    `rows`: the number of operands with rows.
    """

    name: str
    combine: Callable[..., Sequence[Tensor]]
    carry: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    final_carries: tuple[int, ...]
    rows: int
    row_results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    reverse: bool
    axes: RecurrenceAxes

    @property
    def step(self) -> fx.Graph:
        """The operators of one row."""
        return self.combine.__self__.graph  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class TreePlan:
    """An associative scan, computed as a prefix tree (`runtime/prefix_scan.py`), or the gradients of one.

    The operands are the rows of each leaf (along dimension 0, of dtypes `dtypes`), then operands that all rows share. The
    operands of a gradient plan begin with the gradients of the results, except those in `absent_gradients`. `results` has
    the indices of the leaves to compute, or of the operands whose gradients to compute.
    """

    name: str
    combine: int  # index into `runtime/associative.py: COMBINES`
    dtypes: tuple[torch.dtype, ...]
    length: int
    carry_size: Size  # bytes
    results: tuple[int, ...]
    axes: RecurrenceAxes
    absent_gradients: frozenset[int] = frozenset()
