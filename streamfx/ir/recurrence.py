"""Plans of recurrences: operators that pass a state from row to row. In an unrolled loop, each operator belongs to a step:

    for t in range(T):                          step t:  a_t = a[:, t];  x_t = x[:, t]
        state = a[:, t] * state + x[:, t]                state_t = a_t * state_{t-1} + x_t
        y[:, t] = state.tanh()                           y_t = state_t.tanh()
                                                crossing from step t to step t + 1: state_t

Steps may differ: a chunk of rows runs the operators of its rows unchanged. The values that cross from step to step are stored
in one vector of bytes, the *carry*, so that a chunk can start where the chunk before it ended. Values of the steps, and
operands, are identified by numbers (`ValueId`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamfx.ir.signature import AxisLabel, LabelShape
from streamfx.ir.sizes import Size

ROWS: AxisLabel = 0  # the axis of the steps
Shaped: TypeAlias = "tuple[Sequence[Size], int | None]"  # sizes, and the dimension of rows, if there is one
ValueId: TypeAlias = int  # identifies a value of the steps, or an operand


@dataclass(frozen=True)
class StepValue:
    """A placeholder, in the arguments of an `Operation`, for a value that the steps compute."""

    value_id: ValueId


@dataclass(frozen=True)
class RowRead:
    """An instruction: read row `step` of an operand, along dimension `dim`; the row is value `result_id`."""

    result_id: ValueId
    operand: ValueId
    dim: int
    step: int


@dataclass(frozen=True)
class Operation:
    """An instruction: call `target`, an operator, on constants and values of the steps (`StepValue`)."""

    result_id: ValueId
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Instruction: TypeAlias = "RowRead | Operation"


@dataclass(frozen=True)
class Slot:
    """The bytes [start, stop) of a carry that hold one value, and the value's shape and dtype."""

    start: int
    stop: int | None  # None: to the end of the carry
    shape: tuple[int, ...]  # -1: a size known only at run time, at most one
    dtype: torch.dtype

    def read(self, carry: Tensor) -> Tensor:
        """Return a copy of the value, because the carry will be overwritten."""
        if 0 in self.shape:  # an empty slice may not be aligned for a view of this dtype
            return carry.new_empty(self.shape, dtype=self.dtype)
        return carry[self.start : self.stop].view(self.dtype).view(self.shape).clone()

    def write(self, carry: Tensor, value: Tensor) -> None:
        """Copy a value into the carry."""
        if 0 not in self.shape:
            carry[self.start : self.stop].view(self.dtype).copy_(value.reshape(-1))


@dataclass(frozen=True)
class CarrySlot(Slot):
    """The slot of a value that a step passes to the next one."""

    value: ValueId


@dataclass(frozen=True)
class ConcatResult:
    """A result that stacks one value of each step along `dim`; `shape` includes that dimension."""

    values: tuple[ValueId, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SingleStepResult:
    """A result that one step computes, such as the last state. In a loop it is a sum, to which all other chunks add zeros."""

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
    `concat_results`, `single_step_results`: the results of the loop.
    `dead_after[t]`: the values that no operator uses after step t, which may be freed.
    """

    steps: tuple[tuple[Instruction, ...], ...]
    crossing: tuple[tuple[CarrySlot, ...], ...]
    concat_results: tuple[ConcatResult, ...]
    single_step_results: tuple[SingleStepResult, ...]
    reverse: bool
    dead_after: tuple[tuple[ValueId, ...], ...] = ()

    @property
    def carry_size(self) -> int:
        """The bytes of the carry, a multiple of each dtype's size: so values in a row of several carries are aligned."""
        slots = [slot for slots in self.crossing for slot in slots]
        return aligned(
            max((slot.stop or 0 for slot in slots), default=0), max((slot.dtype.itemsize for slot in slots), default=1)
        )


def aligned(start: int, alignment: int) -> int:
    """Return the first multiple of `alignment` that is at least `start`."""
    return -(-start // alignment) * alignment


@dataclass(frozen=True)
class RecurrenceAxes:
    """The axis labels of the dimensions of a recurrence's operands and results; `rows` is the label of the steps."""

    operands: tuple[LabelShape, ...]
    results: tuple[LabelShape, ...]
    rows: AxisLabel


def separate_axes(operands: Iterable[Shaped], results: Iterable[Shaped]) -> RecurrenceAxes:
    """Return axis labels in which tensors share no axis except the rows.

    Nothing is known about operations along other dimensions, so each gets a separate label. `operands` and `results` have
    (sizes, dimension of rows) of each tensor: ([2, 40, 16], 1) -> labels (1), (ROWS), (2).
    """
    labels = count(ROWS + 1)

    def labels_of(sizes: Sequence[Size], row_dim: int | None) -> LabelShape:
        """Return the labels of one tensor's dimensions: `ROWS` for dimension `row_dim`, none for size 1."""
        return tuple((ROWS,) if dim == row_dim else (next(labels),) if size != 1 else () for dim, size in enumerate(sizes))

    return RecurrenceAxes(tuple(labels_of(*item) for item in operands), tuple(labels_of(*item) for item in results), ROWS)


CarryIntervals: TypeAlias = "Sequence[tuple[int, int | None]]"  # (start, stop) of bytes of a carry; None: to its end


@dataclass(frozen=True)
class Truncation:
    """The truncation of the gradients of states, which reach back `num_rows` rows, rounded up to chunks.

    `adjoints[n]` has the intervals of the carry after n rows that hold gradients of states; a single entry applies to all
    n. Other carried values are not truncated: sums of gradients over rows, and forward values.
    """

    num_rows: int
    adjoints: Sequence[CarryIntervals]


@dataclass(frozen=True)
class RecurrencePlan:
    """An unrolled loop as one operator.

    `steps`: the operators that the loop runs.
    `recomputed`: the forward steps that a backward loop recomputes before its own; None for a forward loop.
    `rows`: for each operand with rows, its identifier in `RowRead` and the dimension of the steps.
    `shared`: the value of the steps that each operand without rows holds; these follow the operands with rows.
    """

    name: str
    length: int
    steps: Steps
    recomputed: Steps | None
    rows: Mapping[ValueId, int]
    shared: tuple[ValueId, ...]
    axes: RecurrenceAxes


@dataclass(frozen=True)
class TreePlan:
    """An associative scan, computed as a prefix tree (`runtime/prefix_scan.py`), or the gradients of one.

    The operands are the rows of each leaf (along dimension 0, of dtypes `dtypes`), then operands that all rows share. The
    operands of a gradient plan begin with the gradients of the results, except those in `absent_gradients`. `results` has
    the indices of the leaves to compute, or of the operands whose gradients to compute.
    """

    name: str
    combine: int  # key of `dialect/associative_scan.py: COMBINES`
    dtypes: tuple[torch.dtype, ...]
    length: int
    carry_size: Size  # bytes
    results: tuple[int, ...]
    axes: RecurrenceAxes
    absent_gradients: frozenset[int] = frozenset()
