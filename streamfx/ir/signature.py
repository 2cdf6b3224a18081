"""What an operator does with each axis, in einsum notation.

A `Signature` names the dimensions of one operator's tensor operands and results by letters. A letter on both sides is kept, a
letter missing on the right is contracted (summed); of any other letter it says which `Index` it is: what the operator does with
the rows along it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from streamfx.ir.axis_table import Dim
from streamfx.ir.sizes import Size

Letter: TypeAlias = int
LetterDim: TypeAlias = "tuple[Letter, ...]"
LetterShape: TypeAlias = "tuple[LetterDim, ...]"


@dataclass(frozen=True)
class FullAxis:
    """The operator mixes its rows, and has to be given all of them: softmax, sort."""


@dataclass(frozen=True)
class RunningSum:
    """Each row takes in all rows before it, or, in `reverse`, all after it: a running sum."""

    reverse: bool


@dataclass(frozen=True)
class SingleRow:
    """One row is taken out, or put in among zeros: this one."""

    number: Size


@dataclass(frozen=True)
class Window:
    """Row i goes with the rows i + start .. i + start + reach of another letter: a slice, padding, a convolution.

    `start` is negative for padding. Between two operands of a sum the same holds for a letter that both lose.
    """

    of: Letter
    start: int
    reach: int = 0


@dataclass(frozen=True)
class Tile:
    """Each row is a block of rows of another letter: [(c l)] to [c l]."""

    of: Letter


@dataclass(frozen=True)
class ConcatAxes:
    """Its rows are those of other letters, one behind another: of each of these, how many rows come before."""

    parts: tuple[tuple[Letter, Size], ...]


Index: TypeAlias = FullAxis | RunningSum | SingleRow | Window | Tile | ConcatAxes


def whole(*letters: Letter) -> dict[Letter, Index]:
    """Letters along which an operator has to be given all rows."""
    return dict.fromkeys(letters, FullAxis())


@dataclass(frozen=True)
class Signature:
    """The letters of one node.

    `operands` follow the tensor arguments in the order of the call, `results` the outputs. `index` has the letters that are
    neither kept nor contracted. `atoms` binds letters that stand for less than a whole dimension.
    `keys` marks the letters that run over keys where an attention operator knows it.
    `placed` marks the letters along which an operator counts: what it does with a row depends on the row's number.
    `combine` says how the parts of a contracted letter are put together.
    """

    operands: tuple[LetterShape, ...]
    results: tuple[LetterShape, ...]
    index: Mapping[Letter, Index] = field(default_factory=dict)
    keys: frozenset[Letter] = frozenset()
    placed: frozenset[Letter] = frozenset()
    atoms: Mapping[Letter, Dim] = field(default_factory=dict)
    combine: str = "sum"

    @cached_property
    def whole(self) -> frozenset[Letter]:
        """Letters along which the operator has to be given all rows, unless a loop in the right order may carry something."""
        return frozenset(letter for letter, index in self.index.items() if not isinstance(index, Window))

    @cached_property
    def windows(self) -> dict[Letter, Window]:
        return {letter: index for letter, index in self.index.items() if isinstance(index, Window)}

    @cached_property
    def tiles(self) -> dict[Letter, Tile]:
        return {letter: index for letter, index in self.index.items() if isinstance(index, Tile)}

    @property
    def joined(self) -> tuple[Letter, ConcatAxes] | None:
        """The letter whose rows are those of others, if there is one."""
        return next(((letter, index) for letter, index in self.index.items() if isinstance(index, ConcatAxes)), None)

    def letters(self) -> set[Letter]:
        return _of((*self.operands, *self.results))

    def is_special(self, letter: Letter) -> bool:
        """Whether the operator does anything with a letter beside running along it."""
        others = {index.of for index in self.index.values() if isinstance(index, (Window, Tile))}
        return letter in self.index or letter in self.keys | self.placed | others

    def contracted(self, result: int = 0) -> set[Letter]:
        """Letters of the operands that result number `result` does not have."""
        kept = {letter for dim in self.results[result] for letter in dim}
        kept |= {self.windows[letter].of for letter in kept if letter in self.windows}
        return _of(self.operands) - kept


def _of(shapes: Iterable[LetterShape]) -> set[Letter]:
    return {letter for shape in shapes for dim in shape for letter in dim}
