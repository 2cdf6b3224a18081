"""Which part of the sequence is a row taken from?

Loops are told apart by their number of rows; blocks, and the rows that are left behind them, may be as many. Where it is known of
both where they stand, they are two loops, the first of which is through before the second begins.
"""

from __future__ import annotations

from typing import TypeAlias

from streamfx.ir.facts import AxisFacts
from streamfx.ir.sizes import numeric
from streamfx.passes.scan.row_access import RowAccess

Part: TypeAlias = "tuple[float, int]"


def part_of(row: RowAccess, axes: AxisFacts) -> Part | None:
    """Where its first row stands, and how many rows of the sequence each stands for; None where that is not known."""
    dim = axes.table.resolve(axes.shapes[row.source][row.dim])
    if axes.sequence is None or len(dim) != 1 or dim[0] not in axes.sequence.members:
        return None
    return float(numeric(axes.sequence.members[dim[0]][0])), axes.sequence.block(dim[0])
