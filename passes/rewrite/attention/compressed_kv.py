"""Materialize keys that represent blocks of rows, on a separate axis, before queries that are rows read them.

    scores [t c] = rows [t d] @ blocks [c d]      ->   rows [t d] @ materialized(blocks) [n d]
    d_blocks [c d] = d_scores [c t] @ rows [t d]  ->   materialized(d_scores [n t] @ rows [t d])

A block is computed from the rows of one chunk, but rows of any chunk may read it. So blocks are materialized: once all
are computed, they get an axis n that is not part of the sequence, and chunks of rows read all of it. The gradient of the
blocks is a sum over chunks, and returns to the axis of blocks in the same way. If rows are the keys of blocks (one query
per block), the rows are materialized instead. In the graph, a materialized view is an `alias` with `MATERIALIZED` in its
metadata. An axis label (`AxisLabel`) names a dimension in an operator's signature, as the labels of an einsum do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import fx

from streamfx.ir.axis_table import Dim
from streamfx.ir.facts import AxisFacts, Facts
from streamfx.ir.joint import JointGraph, connected_components, is_tensor, joint_graph, tensor_operands
from streamfx.ir.signature import AxisLabel, LabelShape, Signature, Tile, Window
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import MATERIALIZED
from streamfx.passes.ops.traits import producer_of
from streamfx.passes.rewrite.views.concat_propagation import first_operator_after

aten = torch.ops.aten


@dataclass(frozen=True)
class CompressedKV:
    """Materialize the keys of operators that combine rows with blocks. If the graph changes, its axes are recomputed."""

    name: ClassVar[str] = "compressed_kv"

    def apply(self, facts: Facts) -> Facts:
        """Materialize the keys of operators that combine rows with blocks, in place.

        If the graph changes, the returned facts have no axes: they are then analyzed for the new graph.
        """
        axes, joint = facts.found_axes, facts.joint
        if axes is None or axes.sequence is None or not axes.sequence.blocks:
            return facts
        labels_by_node = {node: labels for node in axes.signatures if (labels := _match_labels(node, axes)) is not None}
        materializer = _Materializer(axes, GraphWriter(joint.graph))
        for group in _group_by_links(labels_by_node, axes):
            blocks_are_keys = _blocks_are_keys(group, labels_by_node, joint, axes)
            for node in group:
                rows, blocks = labels_by_node[node]
                queries, keys = (rows, blocks) if blocks_are_keys else (blocks, rows)
                materializer.materialize(node, queries, keys)
        if not materializer.writer.new_nodes:
            return facts
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)), found_axes=None)


class RowAndBlockLabels(NamedTuple):
    """The axis labels of an operator that combines rows of the sequence with blocks of rows."""

    rows: frozenset[AxisLabel]
    blocks: frozenset[AxisLabel]


def _match_labels(node: fx.Node, axes: AxisFacts) -> RowAndBlockLabels | None:
    """Return the operator's axis labels of sequence rows, and its axis labels of blocks of rows.

    Return None if it does not have both, if it concatenates them, or if it reads a block as its rows (a view that tiles
    rows into blocks, a window of rows per block).
    """
    signature, sequence = axes.signatures[node], axes.sequence
    assert sequence is not None
    sequence_axes = {label: axes.sequence_factor(dim) for label, dim in axes.labels[node].items()}  # None: not the sequence
    rows = frozenset(label for label, axis in sequence_axes.items() if axis is not None and axis not in sequence.blocks)
    blocks = frozenset(label for label, axis in sequence_axes.items() if axis in sequence.blocks)
    related = ({label, index.source} for label, index in signature.index.items() if isinstance(index, (Tile, Window)))
    if not rows or not blocks or signature.concat is not None or any(labels & rows and labels & blocks for labels in related):
        return None
    return RowAndBlockLabels(rows, blocks)


def _group_by_links(labels_by_node: Mapping[fx.Node, RowAndBlockLabels], axes: AxisFacts) -> list[list[fx.Node]]:
    """Group operators that combine rows with blocks, if one passes the other a value that has both, such as scores [t c].

    The groups, and the nodes in each, are in graph order.
    """
    links: list[tuple[fx.Node, fx.Node]] = []
    for node, (rows, blocks) in labels_by_node.items():
        for operand, operand_shape in zip(tensor_operands(node), axes.signatures[node].operands, strict=True):
            operand_labels = {label for dim in operand_shape for label in dim}
            if operand_labels & rows and operand_labels & blocks and producer_of(operand) in labels_by_node:
                links.append((producer_of(operand), node))
    return connected_components(labels_by_node, links)


def _blocks_are_keys(
    group: Iterable[fx.Node], labels_by_node: Mapping[fx.Node, RowAndBlockLabels], joint: JointGraph, axes: AxisFacts
) -> bool:
    """Return whether blocks are the keys that rows read, and not the other way around, by a vote of linked operators.

    An attention that knows its keys has 1000 votes, an operator that normalizes over an axis 100, a forward product that
    sums over an axis one.
    """
    votes = 0  # positive: blocks are the keys; negative: rows are
    for node in group:
        signature, (rows, blocks) = axes.signatures[node], labels_by_node[node]
        contracted = _summed_labels(node, signature, joint)
        for key_labels, weight in ((signature.keys, 1000), (signature.full_labels, 100), (contracted, 1)):
            votes += weight if key_labels & blocks else 0
            votes -= weight if key_labels & rows else 0
    return votes >= 0


def _summed_labels(node: fx.Node, signature: Signature, joint: JointGraph) -> frozenset[AxisLabel]:
    """Return the labels over which a forward operator sums; the empty set for a backward operator."""
    return frozenset(signature.contracted_labels()) if node in joint.forward else frozenset()


class _Materializer:
    """Writes the materialized views: `alias` operators with `MATERIALIZED` in their metadata.

    `key_sources` maps each axis of keys to a value, and its dimension along this axis, before it was materialized.
    """

    def __init__(self, axes: AxisFacts, writer: GraphWriter) -> None:
        """Store the axes and the writer; `views` will hold the materialized view of each value."""
        self.axes, self.writer = axes, writer
        self.views: dict[fx.Node, fx.Node] = {}
        self.key_sources: dict[Dim, tuple[fx.Node, int]] = {}

    def materialize(self, node: fx.Node, queries: frozenset[AxisLabel], keys: frozenset[AxisLabel]) -> None:
        """Materialize an operator's operands and results that have a dimension of keys, and none of queries, in place.

        The operator then reads the views of its operands, and others read the views of its results, which are gradients of
        keys. `queries` and `keys` are axis labels of the operator.
        """
        signature = self.axes.signatures[node]
        for operand, labels in dict(zip(tensor_operands(node), signature.operands, strict=True)).items():
            if (key_dims := _key_dims(labels, queries, keys)) and MATERIALIZED not in operand.meta:
                self.key_sources = {self.axis_of(operand, dim): (operand, dim) for dim in key_dims} | self.key_sources
                node.replace_input_with(operand, self.emit_materialized(operand, dict.fromkeys(key_dims)))
        for result, labels in _labeled_results(node, signature):
            if (key_dims := _key_dims(labels, queries, keys)) and not all(MATERIALIZED in user.meta for user in result.users):
                source_by_dim = {dim: self.key_sources.get(self.axis_of(result, dim)) for dim in key_dims}
                users = list(result.users)
                view = self.emit_materialized(result, source_by_dim)
                for user in users:
                    user.replace_input_with(result, view)

    def axis_of(self, value: fx.Node, dim: int) -> Dim:
        """Return the axis of a dimension of a value, as its factors: two dimensions on one axis return the same tuple."""
        return self.axes.table.resolve(self.axes.shapes[value][dim])

    def emit_materialized(self, value: fx.Node, source_by_dim: Mapping[int, tuple[fx.Node, int] | None]) -> fx.Node:
        """Return the materialized view of a value; emit it, right after the value, at the first call.

        `source_by_dim` goes into its metadata: the dimensions of keys, each with None for an operand. For a result, it has a
        value and its dimension on the axis of blocks or rows to which the result returns (None if it is not known).
        """
        if value not in self.views:
            self.views[value] = self.writer.move_before(first_operator_after(value)).call(aten.alias.default, value)
            self.views[value].meta[MATERIALIZED] = source_by_dim
        return self.views[value]


def _key_dims(labels: LabelShape, queries: frozenset[AxisLabel], keys: frozenset[AxisLabel]) -> tuple[int, ...]:
    """Return the dimensions of a value that have a key label; the empty tuple if any dimension has a query label.

    `labels` holds the axis labels of each dimension of the value.
    """
    if any(queries.intersection(dim) for dim in labels):
        return ()
    return tuple(i for i, dim in enumerate(labels) if keys.intersection(dim))


def _labeled_results(node: fx.Node, signature: Signature) -> Iterator[tuple[fx.Node, LabelShape]]:
    """Yield each tensor result of an operator with its axis labels."""
    if is_tensor(node):
        yield node, signature.results[0]
    for user in node.users:
        if user.target is operator.getitem and is_tensor(user):
            yield user, signature.results[user.args[1]]  # type: ignore[index]
