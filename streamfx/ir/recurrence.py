"""Recurrences: what one row hands to the next. Of one that was written row by row, which operators belong to which row:

    for t in range(T):                          step t:  a_t = a[:, t];  x_t = x[:, t]
        state = a[:, t] * state + x[:, t]                state_t = a_t * state_{t-1} + x_t
        y[:, t] = state.tanh()                           y_t = state_t.tanh()
                                                crossing from step t to step t + 1: state_t

Nothing is assumed about steps being alike: a chunk of rows runs the operators of its rows just as they stand.
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

ROWS: Letter = 0  # what follows one another
Shaped: TypeAlias = "tuple[Sequence[Size], int | None]"  # sizes, and the dimension of rows, where there is one
Number: TypeAlias = int  # of a value, of an operand


@dataclass(frozen=True)
class StepValue:
    """Stands for a value in an operator's arguments."""

    number: Number


@dataclass(frozen=True)
class RowRead:
    """`made` is the row of a step, taken out of an operand."""

    made: Number
    operand: Number
    dim: int
    step: int


@dataclass(frozen=True)
class Operation:
    """`made` is what an operator makes of other values."""

    made: Number
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Instruction: TypeAlias = "RowRead | Operation"


@dataclass(frozen=True)
class CarrySlot:
    """A value that crosses from one step to the next, and the place in the carry that it takes."""

    value: Number
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class ConcatResult:
    """A result whose rows are values of the steps, put together along `dim`."""

    values: tuple[Number, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SingleStepResult:
    """A result that one step makes; in a loop it is a sum to which the other chunks add zeros."""

    value: Number
    step: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Steps:
    """The operators of one direction. `crossing[b]` is what step b - 1 and those before it hand to step b and those after it;
    where the steps run in `reverse`, the other way round. `dead[t]` has no use after step t.
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
    """The letters of a recurrence's operands and results; `rows` is that of the steps."""

    operands: tuple[LetterShape, ...]
    results: tuple[LetterShape, ...]
    rows: Letter


def axes_apart(operands: Iterable[Shaped], results: Iterable[Shaped]) -> RecurrenceAxes:
    """Each dimension has a letter of its own, but for rows: what is done along the others is not looked into."""
    letters = count(ROWS + 1)

    def own(sizes: Sequence[Size], at: int | None) -> LetterShape:
        return tuple((ROWS,) if dim == at else (next(letters),) if size != 1 else () for dim, size in enumerate(sizes))

    return RecurrenceAxes(tuple(own(*item) for item in operands), tuple(own(*item) for item in results), ROWS)


Places: TypeAlias = "Sequence[tuple[int, int | None]]"  # of a carry: where its parts begin and end


@dataclass(frozen=True)
class Truncation:
    """Gradients that reach back so many `rows`, rounded up to chunks.

    `adjoints` says for each number of rows, from none to all, which parts of the carry behind them are gradients of states; it
    has one entry where these are the same for each number. All else that is carried (sums of gradients that rows add to, values
    of the forward half) is carried whole.
    """

    rows: int
    adjoints: Sequence[Places]


@dataclass(frozen=True)
class RecurrencePlan:
    """One operator of a rewritten graph: the steps that it runs, and those of the forward half that it runs again for them.

    `operands` are the numbers of its operands, in order; `rows` says along which dimension the steps lie in those that have
    rows; the others are the values `given`.
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
    """A scan over rows that is one operator: `combine(*carry, *rows, *given)` gives the next carry, and a row of each result.

    Its operands are the first carry, then what has rows (along dimension 0), then what all rows are given; its results are these
    (`finals`) of the last carry, then rows (along dimension 0).
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
    """Rows that are combined with all rows before them, as a tree combines them (`runtime/prefix_scan.py`); or the gradients of that.

    The operands are the rows of each leaf (along dimension 0; of these `types`), and what all rows are given. Those
    of the gradients begin with the gradients of the results, as far as they are not `absent`. `results` are numbers of the leaves
    that are made, or of the operands whose gradients are.
    """

    name: str
    combine: int  # its number: `runtime/associative.py: COMBINES`
    types: tuple[torch.dtype, ...]
    length: int
    carried: Size  # bytes
    results: tuple[int, ...]
    axes: RecurrenceAxes
    absent: frozenset[int] = frozenset()
