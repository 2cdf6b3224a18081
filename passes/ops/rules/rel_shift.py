"""Rows that begin at a column of their own: which one follows from the row's number, and so does what a chunk takes."""

from __future__ import annotations

from streamfx.ir.signature import Signature, whole
from streamfx.passes.ops.rules.registry import RuleCall, rule
from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD


@rule(RELATIVE_SHIFT)
def relative_shift(call: RuleCall) -> Signature:
    """Any rows and any columns of the result can be made alone, of all columns that the rows had."""
    own, shown, dim, last = _letters(call)
    return Signature((own,), (shown,), index=whole(last), placed=frozenset({dim, dim + 1}))


@rule(RELATIVE_SHIFT_BACKWARD)
def relative_shift_backward(call: RuleCall) -> Signature:
    """What columns put into the columns of the operand adds up."""
    own, shown, dim, last = _letters(call)
    return Signature((shown,), (own,), index=whole(last), placed=frozenset({dim, dim + 1}))


def _letters(call: RuleCall) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], int, int]:
    """Dimensions before and after the shift, the letter of rows (columns have the next), and that of all columns before it."""
    rank = len(call.shape)
    shown = tuple((letter,) for letter in range(rank))
    dim: int = call.arguments()["dim"]
    return (*shown[: dim + 1], (rank,), *shown[dim + 2 :]), shown, dim, rank
