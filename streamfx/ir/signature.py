"""What an operator does with each axis, in einsum notation.

A `Signature` names the dimensions of one operator's tensor operands and results by letters. A letter on both sides is
kept, a letter missing on the right is contracted (summed), and a letter in `whole` must be seen in full, because the
operator mixes its rows (softmax, sort, cumulative sum).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from streamfx.ir.axes import Dim
from streamfx.ir.sizes import Size

Letter: TypeAlias = int
LetterDim: TypeAlias = "tuple[Letter, ...]"
LetterShape: TypeAlias = "tuple[LetterDim, ...]"


@dataclass(frozen=True)
class Signature:
    """The letters of one node.

    `operands` follow the tensor arguments in the order of the call, `results` the outputs. `atoms` binds letters that
    stand for less than a whole dimension. `shifts` maps a result's letter to (the operand's letter, start): row i of the
    result is row i + start of the operand (slice), or the other way round where `start` is negative (padding). Where such a
    letter has a `reach`, row i goes with all rows from i + start to i + start + reach (a convolution's window). Between two
    operands of a sum the same holds for a letter that both lose.
    `scans` maps a letter to whether its rows are scanned from the last to the first, each taking in all rows before it.
    `single` maps a letter to the number of the one row that is taken from it, or put into it among zeros.
    `blocks` maps a letter to another one that it cuts into blocks, each of its rows being one: [(c l)] to [c l].
    `keys` marks the letters that run over keys where an attention operator knows it.
    `placed` marks the letters along which an operator counts: what it does with a row depends on the row's number.
    `combine` says how the parts of a contracted letter are put together.
    """

    operands: tuple[LetterShape, ...]
    results: tuple[LetterShape, ...]
    whole: frozenset[Letter] = frozenset()
    keys: frozenset[Letter] = frozenset()
    placed: frozenset[Letter] = frozenset()
    atoms: Mapping[Letter, Dim] = field(default_factory=dict)
    shifts: Mapping[Letter, tuple[Letter, int]] = field(default_factory=dict)
    reach: Mapping[Letter, int] = field(default_factory=dict)
    scans: Mapping[Letter, bool] = field(default_factory=dict)
    single: Mapping[Letter, Size] = field(default_factory=dict)
    blocks: Mapping[Letter, Letter] = field(default_factory=dict)
    combine: str = "sum"

    def letters(self) -> set[Letter]:
        return {letter for shape in (*self.operands, *self.results) for dim in shape for letter in dim}

    def is_special(self, letter: Letter) -> bool:
        """Whether the operator does anything with a letter beside running along it."""
        moved = {letter for item in self.shifts.items() for letter in (item[0], item[1][0])}
        cut = {letter for item in self.blocks.items() for letter in item}
        return letter in self.whole | self.keys | self.placed | moved | cut | set(self.scans) | set(self.single) | set(self.reach)

    def contracted(self, result: int = 0) -> set[Letter]:
        """Letters of the operands that result number `result` does not have."""
        kept = {letter for dim in self.results[result] for letter in dim}
        kept |= {self.shifts[letter][0] for letter in kept if letter in self.shifts}
        return {letter for shape in self.operands for dim in shape for letter in dim} - kept
