"""Recurrences: the state that one row passes to the next. In a loop unrolled row by row, each operator belongs to a step:

    for t in range(T):                          step t:  a_t = a[:, t];  x_t = x[:, t]
        state = a[:, t] * state + x[:, t]                state_t = a_t * state_{t-1} + x_t
        y[:, t] = state.tanh()                           y_t = state_t.tanh()
                                                crossing from step t to step t + 1: state_t

Steps need not be alike: a chunk of rows runs the operators of its rows unchanged.
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
Number: TypeAlias = int  # identifies a value or an operand


@dataclass(frozen=True)
class StepValue:
    """A placeholder for a value in an operator's arguments."""

    number: Number


@dataclass(frozen=True)
class RowRead:
    """Read the row of one step from an operand; `made` is the result."""

    made: Number
    operand: Number
    dim: int
    step: int


@dataclass(frozen=True)
class Operation:
    """Apply an operator to other values; `made` is the result."""

    made: Number
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Instruction: TypeAlias = "RowRead | Operation"


@dataclass(frozen=True)
class CarrySlot:
    """A value that crosses from one step to the next, and its slot in the carry."""

    value: Number
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The end of the slot in the carry."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class ConcatResult:
    """A result that concatenates values of the steps along `dim`."""

    values: tuple[Number, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SingleStepResult:
    """A result that one step computes. In a loop it is a sum to which the other chunks add zeros."""

    value: Number
    step: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Steps:
    """The operators of one direction.

    `crossing[b]` holds the values that the steps before b pass to step b and later steps; in `reverse`, the other way
    around. Values in `dead[t]` are not used after step t.
    """

    steps: tuple[tuple[Instruction, ...], ...]
    crossing: tuple[tuple[CarrySlot, ...], ...]
    joins: tuple[ConcatResult, ...]
    finals: tuple[SingleStepResult, ...]
    dtype: torch.dtype
    reverse: bool
    dead: tuple[tuple[Number, ...], ...] = ()

    @property
    def carried(self) -> int:
        """The number of elements in the carry."""
        return max((slot.stop for slots in self.crossing for slot in slots), default=0)


@dataclass(frozen=True)
class RecurrenceAxes:
    """The letters (axis labels) of a recurrence's operands and results; `rows` labels the steps."""

    operands: tuple[LetterShape, ...]
    results: tuple[LetterShape, ...]
    rows: Letter


def separate_axes(operands: Iterable[Shaped], results: Iterable[Shaped]) -> RecurrenceAxes:
    """Give each dimension its own letter, except rows: operations along the other dimensions are opaque."""
    letters = count(ROWS + 1)

    def label(sizes: Sequence[Size], row_dim: int | None) -> LetterShape:
        """Return letters for the dimensions of one tensor: `ROWS` for dimension `row_dim`, none for size 1."""
        return tuple((ROWS,) if dim == row_dim else (next(letters),) if size != 1 else () for dim, size in enumerate(sizes))

    return RecurrenceAxes(tuple(label(*item) for item in operands), tuple(label(*item) for item in results), ROWS)


Places: TypeAlias = "Sequence[tuple[int, int | None]]"  # intervals (start, stop) of a carry


@dataclass(frozen=True)
class Truncation:
    """The truncation of gradients that reach back `rows` rows, rounded up to chunks.

    For each number of rows, from none to all, `adjoints` has the intervals of the carry after these rows that are
    gradients of states; it has one entry if they are the same for each number. All other carried values (sums of
    gradients to which rows add, forward values) are not truncated.
    """

    rows: int
    adjoints: Sequence[Places]


@dataclass(frozen=True)
class RecurrencePlan:
    """One operator of a rewritten graph: its `own` steps, and the forward steps that it runs `again` for them.

    `operands` are the numbers of its operands, in order. `rows` has the step dimension of each operand that has rows; the
    other operands are the values `given`.
    """

    name: str
    length: int
    own: Steps
    again: Steps | None
    operands: tuple[Number, ...]
    rows: Mapping[Number, int]
    given: Mapping[Number, Number]
    axes: RecurrenceAxes


@dataclass(frozen=True)
class ScanPlan:
    """A scan over rows as one operator: `combine(*carry, *rows, *given)` returns the next carry, and a row of each result.

    The operands are the first carry, then operands with rows (along dimension 0), then operands that all rows share. The
    results are the parts `finals` of the last carry, then rows (along dimension 0).
    """

    name: str
    combine: Callable[..., Sequence[Tensor]]
    carry: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    finals: tuple[int, ...]
    rows: int
    made: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    reverse: bool
    axes: RecurrenceAxes

    @property
    def step(self) -> fx.Graph:
        """The operators of one row."""
        return self.combine.__self__.graph  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class TreePlan:
    """An associative scan, computed as a prefix tree (`runtime/prefix_scan.py`), or the gradients of one.

    The operands are the rows of each leaf (along dimension 0, of dtypes `types`), then operands that all rows share. A
    gradient plan's operands begin with the gradients of the results, except the `absent` ones. `results` has the indices
    of the leaves to compute, or of the operands whose gradients to compute.
    """

    name: str
    combine: int  # index into `runtime/associative.py: COMBINES`
    types: tuple[torch.dtype, ...]
    length: int
    carried: Size  # bytes
    results: tuple[int, ...]
    axes: RecurrenceAxes
    absent: frozenset[int] = frozenset()
