"""Values that are reduced over ranks, as one operator instead of two."""

from __future__ import annotations

from torch import fx

from streamfx.ir.joint import node_argument
from streamfx.ir.writer import GraphWriter
from streamfx.passes.canonicalization.equation import equation
from streamfx.passes.operators.collectives import ELEMENTWISE, WAIT, is_all_reduce
from streamfx.runtime.collectives import ALL_REDUCE


@equation(WAIT)
def reduced_over_ranks(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """wait(all_reduce(x, op, group)) -> all_reduce(x, op, group) with its wait

    What has not arrived is nobody else's: no stage may keep it, and no loop may copy rows of it. Only of reductions that give
    each element from the same element of all ranks.
    """
    begun = node_argument(node)
    if not is_all_reduce(begun) or set(begun.users) != {node}:
        return None
    x, op, group = begun.args
    return writer.call(ALL_REDUCE, x, op, group) if op in ELEMENTWISE and isinstance(group, str) else None
