"""Fuse a reduction over ranks with its wait, and merge sums of reductions into one reduction.

Functional collectives are two operators: one starts the communication, `wait` returns its result. `streamfx`'s all-reduce
is one operator that starts and waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.ir.facts import Facts
from streamfx.ir.joint import has_same_type, joint_graph, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.passes.ops.collectives import ELEMENTWISE, LINEAR_REDUCTIONS, WAIT, is_all_reduce, is_reduced_over_ranks
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(WAIT)
def fuse_all_reduce_with_wait(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """wait(all_reduce(x, op, group)) -> all_reduce(x, op, group) with its wait

    No stage may save the value of a reduction that is still running, and no loop may slice it: so it must be private to one
    operator. Applies only to reductions that compute each element from the same element of all ranks.
    """
    all_reduce = node_argument(node)
    if not is_all_reduce(all_reduce) or set(all_reduce.users) != {node}:
        return None
    x, op, group = all_reduce.args
    return writer.call(ALL_REDUCE, x, op, group) if op in ELEMENTWISE and isinstance(group, str) else None


@dataclass(frozen=True)
class MergeAllReduces:
    """Add values before they are reduced over ranks, so that one reduction is sent.

        add(all_reduce(a, sum), all_reduce(b, sum)) -> all_reduce(add(a, b), sum)

    The gradient of the input of the query, key and value projections is such a sum. Applies only if neither reduction has
    another user, and only to values with a sequence dimension: ranks check that they reduce the same of these values,
    while other reductions may depend on code that differs between ranks. The sums may round differently.
    """

    name: ClassVar[str] = "merge_all_reduces"

    def apply(self, facts: Facts) -> Facts:
        """Merge each sum of two all-reduces into one all-reduce of a sum, in place.

        If the graph changes, the returned facts have no axes (`found_axes`): they are then analyzed for the new graph.
        Without a sequence axis, or if rows are reduced between loops (`separate_reductions`), nothing changes.
        """
        joint, axes, is_changed = facts.joint, facts.found_axes, False
        if axes is None or axes.sequence is None or facts.separate_reductions is not None:
            return facts
        reductions = {node for node in joint.nodes if is_reduced_over_ranks(node) and axes.sequence_dims(axes.shapes[node])}
        writer = GraphWriter(joint.graph)
        for node in joint.nodes if reductions else ():
            operands = node.all_input_nodes
            if node.target is aten.add.Tensor and not node.kwargs and reductions.issuperset(operands) and _can_merge(*operands):
                total = writer.move_before(node).call(aten.add.Tensor, *(operand.args[0] for operand in operands))
                reduced = writer.call(ALL_REDUCE, total, *operands[0].args[1:])
                node.replace_all_uses_with(reduced, propagate_meta=False)
                for unused in (node, *operands):
                    joint.graph.erase_node(unused)
                reductions.add(reduced)
                is_changed = True
        joint = joint_graph(joint.graph, len(joint.primals), len(joint.outputs)) if is_changed else joint
        return replace(facts, joint=joint, found_axes=None) if is_changed else facts


def _can_merge(*operands: fx.Node) -> bool:
    """Return whether there are two operands, both reductions that commute with sums, each with one user.

    Their reduction, group of ranks, shape and dtype must be equal.
    """
    if len(operands) != 2 or any(len(operand.users) != 1 for operand in operands):
        return False
    left, right = operands
    is_same = left.args[1:] == right.args[1:] and has_same_type(left, right) and shape_of_node(left) == shape_of_node(right)
    return is_same and left.args[1] in LINEAR_REDUCTIONS
