"""The effect of an operator on each axis, in einsum notation.

A `Signature` names the dimensions of one operator's tensor operands and results by letters (axis labels). A letter on
both sides is kept; a letter missing on the right is contracted (summed). Any other letter has an `Index`, which says how
the operator accesses the rows along it.
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
    """The operator mixes the rows and needs all of them: softmax, sort."""


@dataclass(frozen=True)
class RunningSum:
    """Each row depends on all rows before it, or on all rows after it if `reverse`: a running sum."""

    reverse: bool


@dataclass(frozen=True)
class SingleRow:
    """The operator selects the row `row_index`, or places one row there, among zeros."""

    row_index: Size


@dataclass(frozen=True)
class Window:
    """Row i reads rows i + start .. i + start + reach of the letter `source`: a slice, padding, a convolution.

    `start` is negative for padding. The letter may also be contracted: then row i of one operand meets these rows of
    another operand in a sum.
    """

    source: Letter
    start: int
    reach: int = 0


@dataclass(frozen=True)
class Tile:
    """Each row is a block of rows of the letter `source`: [(c l)] to [c l]."""

    source: Letter


@dataclass(frozen=True)
class ConcatAxes:
    """The rows of other letters, concatenated. `parts` has each letter, and the number of rows before its first row."""

    parts: tuple[tuple[Letter, Size], ...]


Index: TypeAlias = FullAxis | RunningSum | SingleRow | Window | Tile | ConcatAxes


def full_axes(*letters: Letter) -> dict[Letter, Index]:
    """Return the `index` of a signature for letters along which the operator needs all rows."""
    return dict.fromkeys(letters, FullAxis())


@dataclass(frozen=True)
class Signature:
    """The letters of one node.

    `operands`: the letters of the tensor arguments, in call order; `results`: the letters of the outputs.
    `index`: how the operator accesses letters that are neither kept nor contracted.
    `keys`: the letters over key positions, if the operator is an attention and knows them.
    `index_dependent`: the letters along which the result depends on the index of a row, as `tril` does.
    `atoms`: the axis factor of each letter that labels only a part of a dimension.
    `combine`: the reduction over a contracted letter.
    """

    operands: tuple[LetterShape, ...]
    results: tuple[LetterShape, ...]
    index: Mapping[Letter, Index] = field(default_factory=dict)
    keys: frozenset[Letter] = frozenset()
    index_dependent: frozenset[Letter] = frozenset()
    atoms: Mapping[Letter, Dim] = field(default_factory=dict)
    combine: str = "sum"

    @cached_property
    def full_letters(self) -> frozenset[Letter]:
        """Letters along which the operator needs more than a window of rows; a loop can carry a state for some of them."""
        return frozenset(letter for letter, index in self.index.items() if not isinstance(index, Window))

    @cached_property
    def windows(self) -> dict[Letter, Window]:
        """The letters whose rows read a window of rows of another letter."""
        return {letter: index for letter, index in self.index.items() if isinstance(index, Window)}

    @cached_property
    def tiles(self) -> dict[Letter, Tile]:
        """The letters whose rows are blocks of rows of another letter."""
        return {letter: index for letter, index in self.index.items() if isinstance(index, Tile)}

    @property
    def concat(self) -> tuple[Letter, ConcatAxes] | None:
        """The letter whose rows concatenate the rows of other letters, if there is one."""
        return next(((letter, index) for letter, index in self.index.items() if isinstance(index, ConcatAxes)), None)

    def letters(self) -> set[Letter]:
        """Return the letters of all operands and results."""
        return _letters_of((*self.operands, *self.results))

    def is_special(self, letter: Letter) -> bool:
        """Return whether the operator does not treat all rows of a letter in the same way, or relates it to another letter."""
        related = {index.source for index in self.index.values() if isinstance(index, (Window, Tile))}
        return letter in self.index or letter in self.keys | self.index_dependent | related

    def contracted_letters(self, result: int = 0) -> set[Letter]:
        """Return the letters of the operands that result `result` does not have."""
        kept_letters = {letter for dim in self.results[result] for letter in dim}
        kept_letters |= {self.windows[letter].source for letter in kept_letters if letter in self.windows}
        return _letters_of(self.operands) - kept_letters


def _letters_of(shapes: Iterable[LetterShape]) -> set[Letter]:
    """Return the letters of some shapes."""
    return {letter for shape in shapes for dim in shape for letter in dim}
