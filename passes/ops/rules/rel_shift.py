"""Axis rules of relative shifts (Transformer-XL): row i of the scores is shifted left by an amount that depends on i alone.

So rows can be shifted separately. Labels are integers, one per dimension; one in `full_axes(...)` is needed in full.
"""

from __future__ import annotations

from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule


@rule(RELATIVE_SHIFT)
def relative_shift(call: RuleCall) -> Signature:
    """Axis rule of (x [.., rows, source columns, ..]) -> [.., rows, shifted columns, ..].

    Any slice of rows and columns of the result can be computed from all columns of these rows of x, but its row and column
    indices matter.
    """
    source, shifted, row_label, source_column = _shift_labels(call)
    return Signature((source,), (shifted,), index=full_axes(source_column), index_dependent=frozenset({row_label, row_label + 1}))


@rule(RELATIVE_SHIFT_BACKWARD)
def relative_shift_backward(call: RuleCall) -> Signature:
    """Axis rule of the gradient: [.., rows, shifted columns, ..] -> [.., rows, source columns, ..].

    Gradients of the shifted columns are summed into the source columns, which are produced in full.
    """
    source, shifted, row_label, source_column = _shift_labels(call)
    return Signature((shifted,), (source,), index=full_axes(source_column), index_dependent=frozenset({row_label, row_label + 1}))


def _shift_labels(call: RuleCall) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], int, int]:
    """Return the axis labels before the shift and after it, the label of rows, and that of the columns before the shift.

    Columns are the dimension after rows. For rows in dimension 1: (((0,), (1,), (3,)), ((0,), (1,), (2,)), 1, 3).
    """
    rank = len(call.shape)
    shifted = tuple((label,) for label in range(rank))
    dim: int = call.arguments()["dim"]
    return (*shifted[: dim + 1], (rank,), *shifted[dim + 2 :]), shifted, dim, rank
