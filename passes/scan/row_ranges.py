"""Find the interval of the sequence that a row is selected from.

Unrolled loops are distinguished by their number of rows. But a loop over blocks of rows, and a loop over the rows after the
last block, may have equally many. Then their positions in the sequence distinguish them.
"""

from __future__ import annotations

from typing import NamedTuple

from streamfx.ir.facts import AxisFacts
from streamfx.ir.sizes import numeric
from streamfx.passes.scan.row_access import RowAccess


class SourceRows(NamedTuple):
    """The rows of a value, as rows of the sequence: its first row, and how many each row covers (1, or the size of a block)."""

    first_row: float
    rows_per_row: int


def sequence_start_and_block(row: RowAccess, axes: AxisFacts) -> SourceRows | None:
    """Return the rows of the sequence that the value holds from which `row` is selected.

    x[:, 8:16] -> (8.0, 1). None if this dimension of the value is not the sequence, or not a slice or blocks of it.
    """
    dim = axes.table.resolve(axes.shapes[row.source][row.dim])
    if axes.sequence is None or len(dim) != 1 or dim[0] not in axes.sequence.members:
        return None
    (axis,) = dim
    return SourceRows(float(numeric(axes.sequence.members[axis].offset)), axes.sequence.block(axis))
