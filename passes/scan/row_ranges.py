"""Find the interval of the sequence that a row is selected from.

Unrolled loops are distinguished by their number of rows. But a loop over blocks of rows, and a loop over the rows after the
last block, may have equally many. Then their positions in the sequence distinguish them.
"""

from __future__ import annotations

from typing import TypeAlias

from streamfx.ir.facts import AxisFacts
from streamfx.ir.sizes import numeric
from streamfx.passes.scan.row_access import RowAccess

RowInterval: TypeAlias = "tuple[float, int]"  # the position of the first row, and the block size: 1, or sequence rows per block


def row_interval_of(row: RowAccess, axes: AxisFacts) -> RowInterval | None:
    """Return where the rows of the value that `row` is selected from lie in the sequence: (first position, block size).

    Rows of `x[:, 8:16]` -> (8.0, 1). None if this dimension of the value is not the sequence, or not a slice or block of it.
    """
    dim = axes.table.resolve(axes.shapes[row.source][row.dim])
    if axes.sequence is None or len(dim) != 1 or dim[0] not in axes.sequence.members:
        return None
    (axis,) = dim
    return float(numeric(axes.sequence.members[axis].offset)), axes.sequence.block(axis)
