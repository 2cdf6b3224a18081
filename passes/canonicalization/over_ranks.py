"""Values that are reduced over ranks, as one operator instead of two; sums of sums over ranks, as one of them."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import is_alike, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.passes.canonicalization.equation import equation
from streamfx.passes.operators.collectives import ELEMENTWISE, LINEAR_REDUCTIONS, WAIT, is_all_reduce, is_reduced_over_ranks
from streamfx.runtime.collectives import ALL_REDUCE

aten = torch.ops.aten


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


@equation(aten.add.Tensor)
def sums_over_ranks_together(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """add(all_reduce(a, sum), all_reduce(b, sum)) -> all_reduce(add(a, b), sum)

    Sent once, where nobody reads either by itself: the gradient of what queries, keys and values are made of. Sums over the same
    ranks alone; they round in another order.
    """
    parts = node.args
    if node.kwargs or not all(isinstance(part, fx.Node) and is_reduced_over_ranks(part) for part in parts):
        return None
    one, other = node.all_input_nodes if len(node.all_input_nodes) == 2 else node.all_input_nodes * 2
    is_own = set(one.users) == set(other.users) == {node}
    is_same = one.args[1:] == other.args[1:] and is_alike(one, other) and shape_of_node(one) == shape_of_node(other)
    if not is_own or not is_same or one.args[1] not in LINEAR_REDUCTIONS:
        return None
    return writer.call(ALL_REDUCE, writer.call(aten.add.Tensor, one.args[0], other.args[0]), *one.args[1:])
