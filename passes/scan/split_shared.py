"""Give each reader of a shared table its own view, so that their axes do not unify.

    cat([x[:8] * table, x[8:16] * table])  ->  cat([x[:8] * view of table, x[8:16] * another view of table])

A *table* is a value computed from parameters, buffers and constants alone, such as the decays of a block. The axis analysis
gives the operands of an operator one common axis. So a table that two blocks of rows read unifies the axes of these blocks.
But they lie at two positions of the sequence, so the common axis would have no position. With a view for each reader, the
axes stay separate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.ir.axis_table import AxisFactor
from streamfx.ir.facts import AxisFacts, Facts
from streamfx.ir.joint import JointGraph, is_parameter, is_tensor, joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import OWN_AXES
from streamfx.passes.analysis.axes import sequence_axes
from streamfx.passes.analysis.derived_axes import find_concat_axis, keeps_row_positions
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.traits import is_random

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitShared:
    """The pass: it splits shared tables if more concatenations then keep rows of the sequence at their positions."""

    name: ClassVar[str] = "split_shared"

    def apply(self, facts: Facts) -> Facts:
        """Return facts with a view of the table for each reader, and without axes, so that these are analyzed again.

        If that does not help, remove the views and return the same facts. It helps if more concatenations then keep rows of
        the sequence at their positions, so that they can run chunk by chunk.
        """
        axes = facts.found_axes
        shared = set() if axes is None or axes.sequence is None else _axes_shared_by_operands(facts.joint, axes)
        if axes is None or not shared or not (views := _insert_views(facts.joint, axes, shared)):
            return facts
        joint = joint_graph(facts.joint.graph, len(facts.joint.primals), len(facts.joint.outputs))
        if _count_concats_in_place(sequence_axes(joint)) > _count_concats_in_place(axes):
            return replace(facts, joint=joint, found_axes=None)
        for view in views:
            view.replace_all_uses_with(view.all_input_nodes[0], propagate_meta=False)
            joint.graph.erase_node(view)
        return facts


def _axes_shared_by_operands(joint: JointGraph, axes: AxisFacts) -> set[AxisFactor]:
    """Return the axes of the sequence that two or more operands of one concatenation have: probably unified by a table.

    Two blocks at different positions should have two axes.
    """
    shared: set[AxisFactor] = set()
    for node in joint.nodes:
        if node.target is aten.cat.default and node in axes.signatures and (concat := find_concat_axis(node, axes)) is not None:
            operand_axes = [axis for axis, _ in concat.parts]
            shared |= {
                axis for axis in operand_axes if operand_axes.count(axis) > 1 and axes.sequence_factor((axis,)) is not None
            }
    return shared


def _insert_views(joint: JointGraph, axes: AxisFacts, shared: set[AxisFactor]) -> list[fx.Node]:
    """For each table with an axis in `shared`: insert an alias of it before each of its readers, in place; return the aliases.

    The metadata `OWN_AXES` makes the axis analysis give an alias axes separate from the table's.
    """
    writer = GraphWriter(joint.graph)
    aliases: list[fx.Node] = []
    tables = _find_tables(joint)
    for table in tables:
        has_shared_axis = is_tensor(table) and any(shared.intersection(axes.table.resolve(dim)) for dim in axes.shapes[table])
        if has_shared_axis:
            for reader in [user for user in table.users if user not in tables and user.op == "call_function"]:
                alias = writer.move_before(reader).call(aten.alias.default, table)
                alias.meta[OWN_AXES] = True
                reader.replace_input_with(table, alias)
                aliases.append(alias)
    return aliases


def _find_tables(joint: JointGraph) -> dict[fx.Node, None]:
    """Return the values computed from parameters, buffers and constants alone, in graph order (a dict used as an ordered set)."""
    tables = dict.fromkeys(node for node in joint.sources if _is_constant(node))
    for node in joint.nodes:
        if not is_random(node) and not is_collective(node) and all(source in tables for source in node.all_input_nodes):
            tables[node] = None
    return tables


def _is_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" or is_parameter(node)


def _count_concats_in_place(axes: AxisFacts) -> int:
    """Return the number of concatenations that keep rows of the sequence at their positions, as in `cat([x[:8], x[8:]])`."""
    return sum(1 for node in axes.signatures if node.target is aten.cat.default and keeps_row_positions(node, axes))
