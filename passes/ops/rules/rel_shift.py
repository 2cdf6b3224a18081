"""Rules of relative shifts: the shift of a row depends on its index alone, so rows can be shifted separately."""

from __future__ import annotations

from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule
from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD


@rule(RELATIVE_SHIFT)
def relative_shift(call: RuleCall) -> Signature:
    """Any slice of rows and columns of the result can be computed from all columns of these rows of the operand."""
    source, shifted, dim, last = _letters(call)
    return Signature((source,), (shifted,), index=full_axes(last), index_dependent=frozenset({dim, dim + 1}))


@rule(RELATIVE_SHIFT_BACKWARD)
def relative_shift_backward(call: RuleCall) -> Signature:
    """Gradients of the shifted columns are summed into the columns of the operand."""
    source, shifted, dim, last = _letters(call)
    return Signature((shifted,), (source,), index=full_axes(last), index_dependent=frozenset({dim, dim + 1}))


def _letters(call: RuleCall) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], int, int]:
    """Return the labels before and after the shift, the label of rows (columns have the next), and the label of
    unshifted columns.
    """
    rank = len(call.shape)
    shifted = tuple((letter,) for letter in range(rank))
    dim: int = call.arguments()["dim"]
    return (*shifted[: dim + 1], (rank,), *shifted[dim + 2 :]), shifted, dim, rank
