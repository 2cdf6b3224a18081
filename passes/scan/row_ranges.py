"""Find the interval of the sequence that a row is selected from.

Loops are distinguished by their number of rows. But a loop over blocks and a loop over the rows after the last block may
have equally many. Then their positions distinguish them.
"""

from __future__ import annotations

from typing import TypeAlias

from streamfx.ir.facts import AxisFacts
from streamfx.ir.sizes import numeric
from streamfx.passes.scan.row_access import RowAccess

RowInterval: TypeAlias = "tuple[float, int]"  # the position of the first row, and the number of sequence rows per row


def row_interval_of(row: RowAccess, axes: AxisFacts) -> RowInterval | None:
    """Return the interval of the value from which a row is selected; None if unknown."""
    dim = axes.table.resolve(axes.shapes[row.source][row.dim])
    if axes.sequence is None or len(dim) != 1 or dim[0] not in axes.sequence.members:
        return None
    return float(numeric(axes.sequence.members[dim[0]].offset)), axes.sequence.block(dim[0])
