"""Values joined along the sequence, as a sum of paddings: each has rows at a place of its own.

cat(memory, x)  ->  pad(memory, behind) + pad(x, in front)
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import fx

from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import JointGraph, bound_arguments, joint_graph, shape_of_node
from streamfx.passes.building import GraphWriter

aten = torch.ops.aten

MOST = 3  # operands: a value joined row by row would be padded once for each row


def joins_along_sequence(joint: JointGraph, axes: AxisFacts) -> list[fx.Node]:
    """The joins of computed rows in front of the sequence, or behind it."""
    return [node for node in joint.nodes if node.target is aten.cat.default and _is_join(node, axes)]


def _is_join(node: fx.Node, axes: AxisFacts) -> bool:
    operands, dim = node.args[0], bound_arguments(node)["dim"] % len(shape_of_node(node))
    if node in axes.static or len(operands) > MOST or not all(_fits(node, item, dim) for item in operands):  # type: ignore[arg-type,union-attr]
        return False
    along = [axes.sequence_atom(axes.shapes[item][dim]) for item in (node, *operands)]  # type: ignore[misc]
    return any(atom is not None for atom in along)


def _fits(node: fx.Node, operand: fx.Node, dim: int) -> bool:
    """Whether a padded operand can be added to the others."""
    own, value = operand.meta["val"], node.meta["val"]
    return bool(
        own.dtype == value.dtype
        and value.dtype.is_floating_point
        and own.dim() == value.dim()
        and isinstance(own.shape[dim], int)
    )


def as_sums_of_paddings(joint: JointGraph, joins: list[fx.Node]) -> JointGraph:
    """The graph with each of these joins taken apart, in place."""
    writer = GraphWriter(joint.graph)
    for node in joins:
        made = _sum_of_paddings(node, writer.before(node))
        node.replace_all_uses_with(made, propagate_meta=False)
        joint.graph.erase_node(node)
    return joint_graph(joint.graph, len(joint.primals), len(joint.outputs))


def _sum_of_paddings(node: fx.Node, writer: GraphWriter) -> fx.Node:
    operands: list[fx.Node] = node.args[0]  # type: ignore[assignment]
    rank, dim = len(shape_of_node(node)), bound_arguments(node)["dim"] % len(shape_of_node(node))
    lengths = [item.meta["val"].shape[dim] for item in operands]
    total, befores = sum(lengths), [0, *accumulate(lengths)]
    made: fx.Node | None = None
    for operand, before, length in zip(operands, befores, lengths, strict=False):
        pad = [0, 0] * (rank - 1 - dim) + [before, total - before - length]
        part = writer.call(aten.constant_pad_nd.default, operand, pad, 0.0)
        made = part if made is None else writer.call(aten.add.Tensor, made, part)
    assert made is not None
    return made
