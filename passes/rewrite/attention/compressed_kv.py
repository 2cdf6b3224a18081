"""Materialize keys that represent blocks of rows, on a separate axis, before queries that are rows read them.

    scores [t c] = rows [t d] @ blocks [c d]      ->   rows [t d] @ collected(blocks) [n d]
    d_blocks [c d] = d_scores [c t] @ rows [t d]  ->   collected(d_scores [n t] @ rows [t d])

A block is computed from the rows of one chunk, but rows of any chunk may read it. So blocks are materialized: once all
are computed, they get an axis that is not part of the sequence, and chunks of rows read all of it. The gradient of the
blocks is a sum over chunks, and returns to the axis of blocks in the same way. If rows are the keys of blocks (one query
per block), the rows are materialized instead.
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
from streamfx.ir.signature import Letter, LetterShape, Signature, Tile, Window
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
        """Materialize the keys of operators that combine rows with blocks, and drop the axes if anything changed."""
        axes, joint = facts.found_axes, facts.joint
        if axes is None or axes.sequence is None or not axes.sequence.blocks:
            return facts
        axes_by_node = {node: block_axes for node in axes.signatures if (block_axes := _match_axes(node, axes)) is not None}
        collector = _Collector(axes, GraphWriter(joint.graph))
        for group in _group_by_links(axes_by_node, axes):
            are_keys = _blocks_are_keys(group, axes_by_node, joint, axes)
            for node in group:
                collector.materialize(node, axes_by_node[node] if are_keys else BlockAxes(*axes_by_node[node][::-1]))
        if not collector.writer.new_nodes:
            return facts
        return replace(facts, joint=joint_graph(joint.graph, len(joint.primals), len(joint.outputs)), found_axes=None)


class BlockAxes(NamedTuple):
    """The axis labels of an operator that combines rows of the sequence with blocks of rows."""

    rows: frozenset[Letter]
    blocks: frozenset[Letter]


def _match_axes(node: fx.Node, axes: AxisFacts) -> BlockAxes | None:
    """Return the labels of rows and blocks; None if one label is derived from the other, or if a dimension has both."""
    signature, sequence = axes.signatures[node], axes.sequence
    assert sequence is not None
    atoms = {letter: axes.sequence_atom(dim) for letter, dim in axes.letters[node].items()}
    rows = frozenset(letter for letter, atom in atoms.items() if atom is not None and atom not in sequence.blocks)
    blocks = frozenset(letter for letter, atom in atoms.items() if atom in sequence.blocks)
    related = ({letter, index.source} for letter, index in signature.index.items() if isinstance(index, (Tile, Window)))
    if not rows or not blocks or signature.concat is not None or any(labels & rows and labels & blocks for labels in related):
        return None
    return BlockAxes(rows, blocks)


def _group_by_links(pairs: Mapping[fx.Node, BlockAxes], axes: AxisFacts) -> list[list[fx.Node]]:
    """Group operators that pass values with rows and blocks to each other, in graph order."""
    links: list[tuple[fx.Node, fx.Node]] = []
    for node, pair in pairs.items():
        for source, letters in zip(tensor_operands(node), axes.signatures[node].operands, strict=True):
            labels = {letter for dim in letters for letter in dim}
            if labels & pair.rows and labels & pair.blocks and producer_of(source) in pairs:
                links.append((producer_of(source), node))
    return connected_components(pairs, links)


def _blocks_are_keys(group: Iterable[fx.Node], pairs: Mapping[fx.Node, BlockAxes], joint: JointGraph, axes: AxisFacts) -> bool:
    """Return whether operators normalize over blocks, or sum over them in the forward graph, rather than over rows."""
    votes = 0
    for node in group:
        signature = axes.signatures[node]
        for letters, weight in ((signature.keys, 1000), (signature.full_letters, 100), (_contracted(node, signature, joint), 1)):
            votes += weight * (bool(letters & pairs[node].blocks) - bool(letters & pairs[node].rows))
    return votes >= 0


def _contracted(node: fx.Node, signature: Signature, joint: JointGraph) -> frozenset[Letter]:
    """Return the labels that a forward operator contracts; none for backward operators."""
    return frozenset(signature.contracted_letters()) if node in joint.forward else frozenset()


class _Collector:
    """Write the materialized views. `sources` maps each axis of keys to a value and its dimension along this axis."""

    def __init__(self, axes: AxisFacts, writer: GraphWriter) -> None:
        """Store the axes and the writer."""
        self.axes, self.writer = axes, writer
        self.views: dict[fx.Node, fx.Node] = {}
        self.sources: dict[Dim, tuple[fx.Node, int]] = {}

    def materialize(self, node: fx.Node, pair: BlockAxes) -> None:
        """Materialize the operands and results of an operator that have key labels (`pair.blocks`) but no row labels."""
        signature = self.axes.signatures[node]
        for operand, letters in dict(zip(tensor_operands(node), signature.operands, strict=True)).items():
            if (block_dims := _dims_of(letters, pair)) and MATERIALIZED not in operand.meta:
                self.sources = {self.axis_of(operand, dim): (operand, dim) for dim in block_dims} | self.sources
                node.replace_input_with(operand, self.materialized(operand, dict.fromkeys(block_dims)))
        for result, letters in _labeled_results(node, signature):
            if (block_dims := _dims_of(letters, pair)) and not all(MATERIALIZED in user.meta for user in result.users):
                source_by_dim = {dim: self.sources.get(self.axis_of(result, dim)) for dim in block_dims}
                users, view = list(result.users), self.materialized(result, source_by_dim)
                for user in users:
                    user.replace_input_with(result, view)

    def axis_of(self, value: fx.Node, dim: int) -> Dim:
        """Return the axis of a dimension of a value."""
        return self.axes.table.resolve(self.axes.shapes[value][dim])

    def materialized(self, value: fx.Node, dims: Mapping[int, tuple[fx.Node, int] | None]) -> fx.Node:
        """Return the materialized view of a value, which is emitted once, right after the value."""
        if value not in self.views:
            self.views[value] = self.writer.before(first_operator_after(value)).call(aten.alias.default, value)
            self.views[value].meta[MATERIALIZED] = dims
        return self.views[value]


def _dims_of(letters: LetterShape, pair: BlockAxes) -> tuple[int, ...]:
    """Return the dimensions of a value that hold blocks, if none of its dimensions holds rows."""
    if any(pair.rows.intersection(dim) for dim in letters):
        return ()
    return tuple(i for i, dim in enumerate(letters) if pair.blocks.intersection(dim))


def _labeled_results(node: fx.Node, signature: Signature) -> Iterator[tuple[fx.Node, LetterShape]]:
    """Yield each tensor result of an operator with its axis labels."""
    if is_tensor(node):
        yield node, signature.results[0]
    for user in node.users:
        if user.target is operator.getitem and is_tensor(user):
            yield user, signature.results[user.args[1]]  # type: ignore[index]
