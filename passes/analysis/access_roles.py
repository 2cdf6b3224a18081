"""Find the rows that each operator needs of its operands, and the storage class of its results.

Every axis label that ranges over the sequence gets a role: the chunk's own rows (query positions), the keys that
those rows see, or all rows. If a value has two sequence dimensions (masks, scores, probabilities), one is rows and the
other keys, and operators propagate that choice between values (a union-find with parity). Two facts decide which one is
keys: a softmax runs over keys, and a product in the forward graph contracts keys. All other labels are rows.

    scores [b h t t] = q [b h t d] @ k [b h d t]    ->    q: rows, k: keys, scores: rows x keys

A `Signature` names the dimensions of an operator's operands and results by axis labels (`AxisLabel`, an integer); a label stands
for one or more axis factors (`factors`). Storage classes: ROWS are computed chunk by chunk, PAIR is query by key positions, SUM
and KEYSUM are sums over chunks; WHOLE has the sequence but is computed at once, between loops, and OUTSIDE lacks the sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

from torch import fx

from streamfx.ir.facts import AccessFacts, AxisFacts, DimAxes, Facts, Role, StorageClass
from streamfx.ir.joint import JointGraph, is_size, is_tensor, num_elements, tensor_operands
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.signature import AxisLabel, LabelShape, RunningSum, Signature, SingleRow, Tile, Window
from streamfx.ir.sizes import numeric, product
from streamfx.node_meta import MATERIALIZED
from streamfx.passes.analysis.derived_axes import keeps_row_positions
from streamfx.passes.analysis.diagnostics import fallback_reason, too_many_dims_reason
from streamfx.passes.analysis.parity_union_find import ParityUnionFind
from streamfx.passes.ops.collectives import is_reduced_over_ranks, is_wait
from streamfx.passes.ops.opaque import is_nested_result
from streamfx.passes.ops.traits import is_expensive, is_random

ATTENTION_WEIGHT, SOFTMAX_WEIGHT, PRODUCT_WEIGHT = 1000, 100, 1  # of the evidence that a label is keys
MAX_STATIC_WIDTH = 4096  # elements per row of values that are computed once, in full: positions, rotary tables, labels
DEPENDS_ON_INDEX = "{target} depends on row indices along a dimension that is not the sequence alone"
REDUCES_PAIRS = "query-by-key values are reduced over ranks, and ranks may differ in the keys that a chunk sees"
MIXES_BLOCKS = "{target} mixes blocks of rows of the sequence"


@dataclass(frozen=True)
class AccessRoles:
    """The pass that finds roles of axis labels and storage classes of values."""

    name: ClassVar[str] = "access_roles"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the role of each axis label and the storage class of each value."""
        return replace(facts, found_access=_Analysis(facts.joint, facts.axes, facts.fallbacks, facts.separate_reductions).run())


def is_unanimous(facts: Facts) -> bool:
    """Return whether each axis label with evidence that it is keys has that role: more layers would not change the roles."""
    analysis = _Analysis(facts.joint, facts.axes, facts.fallbacks, facts.separate_reductions)
    roles = analysis._orientation()
    evidence = {(node, label) for node in {node for node, _ in roles} for label, _ in analysis._key_labels(node)}
    return all(roles[item] is Role.KEYS for item in evidence)


class _Analysis:
    """Assigns roles to axis labels, and storage classes to results, in program order."""

    def __init__(self, joint: JointGraph, axes: AxisFacts, fallbacks: Mapping[str, str], separate_reductions: str | None) -> None:
        """Start without results. `fallbacks`: why operators run unchunked, by name.

        `separate_reductions`: why reductions over ranks cannot run in loops; None if they can.
        """
        self.joint, self.nodes, self.axes = joint, joint.nodes, axes
        self.fallbacks, self.separate_reductions = fallbacks, separate_reductions
        self.roles: dict[fx.Node, dict[AxisLabel, Role]] = {}
        self.storage_classes: dict[fx.Node, tuple[StorageClass, ...]] = {}
        self.reasons: dict[fx.Node, str] = {}
        self._sequence_dims: dict[fx.Node, tuple[int, ...]] = {}
        self._sequence_labels = cache(self._find_sequence_labels)

    def run(self) -> AccessFacts:
        """Visit the graph in program order; return roles, storage classes, and why operators are not chunked."""
        for node in self.joint.sources:
            if is_tensor(node):
                self.storage_classes[node] = (StorageClass.WHOLE if self._dims(node) else StorageClass.OUTSIDE,)
        orientation = self._orientation()
        for node in self.nodes:
            if node.target is operator.getitem:
                if is_tensor(node):
                    self.storage_classes[node] = (self.storage_classes[node.args[0]][node.args[1]],)  # type: ignore[index]
            elif is_size(node):
                self.storage_classes[node] = (StorageClass.OUTSIDE,)
            else:
                self.storage_classes[node] = self._storage_classes(node, orientation)
        self._unchunk_cheap_neighbors()
        return AccessFacts(self.roles, self.storage_classes, self.reasons)

    def _unchunk_cheap_neighbors(self) -> None:
        """Change cheap operators with unchunked operands and users, such as sums of a few gradients, from ROWS to WHOLE."""
        candidates = set[fx.Node]()  # cheap operators that reach one that falls back (`reasons`) through cheap operators alone
        for node in reversed(self.nodes):
            if any(user in candidates or user in self.reasons for user in node.users) and self._is_cheap_unchunked(node):
                candidates.add(node)
        for node in (node for node in self.nodes if node in candidates):
            with_rows = [operand for operand in tensor_operands(node) if self._dims(operand)]
            if not with_rows and not any(user in self.reasons for user in node.users):
                continue
            if all(self.storage_classes[operand][0] is StorageClass.WHOLE for operand in with_rows):
                self.storage_classes[node] = (StorageClass.WHOLE,)

    def _is_cheap_unchunked(self, node: fx.Node) -> bool:
        """Return whether an operator is cheap, and its result (ROWS so far) has no more elements than its largest operand."""
        if not is_tensor(node) or self.storage_classes[node] != (StorageClass.ROWS,) or is_expensive(node) or is_random(node):
            return False
        operands = tensor_operands(node)
        return not operands or num_elements(node) <= max(map(num_elements, operands))

    def _dims(self, node: fx.Node) -> tuple[int, ...]:
        """Return the dimensions of a value that contain the sequence."""
        if node not in self._sequence_dims:
            self._sequence_dims[node] = self.axes.sequence_dims(self.axes.shapes[node])
        return self._sequence_dims[node]

    def _find_sequence_labels(self, node: fx.Node) -> list[AxisLabel]:
        """Return the axis labels of an operator that range over the sequence, or over an axis derived from it."""
        labels = self.axes.labels.get(node, {})
        return [label for label, dim in labels.items() if self.axes.sequence_factor(dim) is not None]

    def _sequence_dim_count(self, signature: Signature, labels: list[AxisLabel]) -> int:
        """Return how many of an operator's sequence labels are unrelated: a label and its slices, or blocks, count once."""
        related = [(label, index.source) for label, index in signature.index.items() if isinstance(index, (Window, Tile))]
        if signature.concat is not None:
            label, concat = signature.concat
            related += [(part, label) for part, _ in concat.parts]
        return len(labels) - sum(label in labels and other in labels for label, other in related)

    def _has_blocks(self, node: fx.Node, labels: list[AxisLabel]) -> bool:
        """Return whether one of an operator's labels is an axis of blocks of sequence rows."""
        sequence = self.axes.sequence
        factors = (self.axes.sequence_factor(self.axes.labels[node][label]) for label in labels)
        return sequence is not None and any(factor in sequence.blocks for factor in factors)

    # -- rows or keys

    def _orientation(self) -> dict[tuple[fx.Node, AxisLabel], Role]:
        """Return a role for each (operator, label) of operators with two sequence dimensions: ROWS or KEYS.

        Related labels form a set of equals and opposites, which votes; static values, such as masks, decide only if no
        computed value does. A set whose relations contradict each other gets WHOLE.
        """
        parity = ParityUnionFind()
        votes = dict[Hashable, tuple[int, int]]()  # by root: of computed and of static values, positive if the root is keys
        pairs = [node for node in self.axes.signatures if self._is_pair(node)]
        for node in pairs:
            self._relate(node, parity)
        for node in pairs:
            for label, weight in self._key_labels(node):
                root, flipped = parity.find((node, label))
                computed, static = votes.get(root, (0, 0))
                signed = -weight if flipped else weight
                votes[root] = (computed, static + signed) if node in self.axes.static else (computed + signed, static)
        roles = {}
        for node in pairs:
            for label in self._sequence_labels(node):
                root, flipped = parity.find((node, label))
                if root in parity.broken:
                    roles[node, label] = Role.WHOLE
                else:
                    is_root_keys = votes.get(root, (-1, 0)) > (0, 0)  # static votes count if computed ones sum to 0
                    is_keys = is_root_keys != bool(flipped)
                    roles[node, label] = Role.KEYS if is_keys else Role.ROWS
        return roles

    def _is_pair(self, node: fx.Node) -> bool:
        """Return whether an operator has two sequence dimensions, rows and keys, and neither is an axis of blocks."""
        labels = self._sequence_labels(node)
        return self._sequence_dim_count(self.axes.signatures[node], labels) == 2 and not self._has_blocks(node, labels)

    def _relate(self, node: fx.Node, parity: ParityUnionFind) -> None:
        """Record in `parity`: an operator's two sequence labels are opposite; each equals the dimensions that it labels.

        The elements of `parity` are labels, (operator, label), and dimensions of values, (value, ("dim", index)).
        """
        signature, labels = self.axes.signatures[node], self._sequence_labels(node)
        shifted = [label for label in labels if label in signature.windows and signature.windows[label].source in labels]
        for label in shifted:
            parity.relate((node, label), (node, signature.windows[label].source), opposite=False)
        first_label, *other_labels = [label for label in labels if label not in shifted]
        for other_label in other_labels:
            parity.relate((node, first_label), (node, other_label), opposite=True)
        values = [*zip(tensor_operands(node), signature.operands, strict=True)]
        values += [(user, shape) for user, shape in self._results(node, signature)]
        for value, label_shape in values:
            dims = self._dims(value)
            if len(dims) == 2:
                for dim in dims:
                    for label in label_shape[dim]:
                        if label in labels:
                            parity.relate((value, ("dim", dim)), (node, label), opposite=False)

    def _results(self, node: fx.Node, signature: Signature) -> list[tuple[fx.Node, LabelShape]]:
        """Return (node, labels of its dimensions) for each tensor result of an operator: itself, or the items of its tuple."""
        if is_tensor(node):
            return [(node, signature.results[0])]
        users = [user for user in node.users if user.target is operator.getitem and is_tensor(user)]
        return [(user, signature.results[user.args[1]]) for user in users]  # type: ignore[index]

    def _key_labels(self, node: fx.Node) -> list[tuple[AxisLabel, int]]:
        """Return (label, weight) for each sequence label of an operator for which there is evidence that it is keys.

        Attention declares its keys, a softmax needs keys in full, and a product in the forward graph contracts keys.
        """
        signature, labels = self.axes.signatures[node], self._sequence_labels(node)
        if signature.keys:
            return [(label, ATTENTION_WEIGHT) for label in signature.keys if label in labels]
        evidence = [(label, SOFTMAX_WEIGHT) for label in labels if label in signature.full_labels]
        if node in self.joint.forward and node not in self.axes.static:
            evidence += [(label, PRODUCT_WEIGHT) for label in labels if label in signature.contracted_labels()]
        return evidence

    # -- storage classes

    def _storage_classes(self, node: fx.Node, orientation: dict[tuple[fx.Node, AxisLabel], Role]) -> tuple[StorageClass, ...]:
        """Return the storage class of each result; `orientation`: roles of operators with two sequence dimensions.

        Also record the roles of a chunked operator's labels; for one that falls back, record the reason instead.
        """
        result_dims = self.axes.results[node]
        outside = tuple(StorageClass.WHOLE if self.axes.sequence_dims(shape) else StorageClass.OUTSIDE for shape in result_dims)
        operands = tensor_operands(node)
        has_sequence = any(self._dims(operand) for operand in operands) or StorageClass.WHOLE in outside
        if not has_sequence or is_nested_result(node):
            return outside
        if node.name in self.fallbacks:
            self.reasons[node] = self.fallbacks[node.name]
            return outside
        if self._is_computed_once(node, result_dims):
            return outside
        signature = self.axes.signatures.get(node)
        if signature is None:
            if not is_wait(node):  # a wait has the reason of its collective
                self.reasons[node] = self.axes.missing_rules.get(node, f"no rule for {node.target}")
            return outside
        labels = self._sequence_labels(node)
        sequence_dim_count = self._sequence_dim_count(signature, labels)
        if sequence_dim_count > 2 or self._has_sequence_twice(node, operands):
            self.reasons[node] = too_many_dims_reason(node, signature, self.axes, labels)
            return outside
        if sequence_dim_count == 2 and self._has_blocks(node, labels):
            if any(self.storage_classes[operand][0] not in (StorageClass.OUTSIDE, StorageClass.WHOLE) for operand in operands):
                self.reasons[node] = MIXES_BLOCKS.format(target=node.target)
            return outside
        position_labels = [label for label in labels if label in signature.index_dependent]
        if any(self.axes.row_axis(self.axes.labels[node][label]) is None for label in position_labels):
            self.reasons[node] = DEPENDS_ON_INDEX.format(target=node.target)
            return outside
        roles = self._roles(node, signature, labels, orientation)
        self.roles[node] = roles
        outside_reason = REDUCES_PAIRS if Role.KEYS in roles.values() else self.separate_reductions
        if is_reduced_over_ranks(node) and outside_reason is not None:
            self.reasons[node] = outside_reason
            return outside
        if is_reduced_over_ranks(node) and self.storage_classes[operands[0]][0] is StorageClass.WHOLE:
            return outside  # all rows exist: one collective reduces them
        if self._must_run_unchunked(signature, roles):
            if self._reads_loop_values(node, signature) and MATERIALIZED not in node.meta:
                self.reasons[node] = fallback_reason(node, signature, self.axes)
            return outside
        return tuple(self._storage_class(label_shape, roles) for label_shape in signature.results)

    def _is_computed_once(self, node: fx.Node, result_dims: tuple[DimAxes, ...]) -> bool:
        """Return whether a static value, such as a table of positions, is computed once, in full, instead of chunk by chunk.

        It must be narrow, and its operands must not be chunked: a sum of a mask must not compute the full mask.
        """
        if node not in self.axes.static or not all(self._is_narrow(dims) for dims in result_dims):
            return False
        storage_classes = [self.storage_classes[operand][0] for operand in tensor_operands(node)]
        return not {StorageClass.ROWS, StorageClass.PAIR}.intersection(storage_classes) and not self._is_filled_later(node)

    def _is_narrow(self, dims: DimAxes) -> bool:
        """Return whether a static value is small enough to compute in full: one sequence dimension, and a limited width.

        The width is its number of elements per row of the sequence.
        """
        factors = [self.axes.table.resolve(dim) for dim in dims]
        width = product(self.axes.table.size(factor) for dim in factors for factor in dim if not self._is_sequence_axis(factor))
        num_materialized = sum(not self._materialized_factors.isdisjoint(dim) for dim in factors)
        return len(self.axes.sequence_dims(dims)) + num_materialized <= 1 and numeric(width) <= MAX_STATIC_WIDTH

    @cached_property
    def _materialized_factors(self) -> frozenset[int]:
        """The axis factors whose rows all exist at once (`MATERIALIZED` in a view's metadata), as keys do."""
        views = [(node, dim) for node in self.nodes for dim in node.meta.get(MATERIALIZED, ())]
        return frozenset(factor for node, dim in views for factor in self.axes.table.resolve(self.axes.shapes[node][dim]))

    def _is_filled_later(self, node: fx.Node) -> bool:
        """Return whether a node is a constant fill that only computed values use: then each chunk creates its own rows."""
        return is_kind(node, Kind.FILL) and not any(user in self.axes.static for user in node.users)

    def _is_sequence_axis(self, factor: int) -> bool:
        return self.axes.sequence is not None and factor in self.axes.sequence.members

    def _reads_loop_values(self, node: fx.Node, signature: Signature) -> bool:
        """Return whether an unchunked operator reads values that loops compute: it is not static, nor a slice of a table."""
        windows = signature.windows.items()
        is_from_table = any(self._is_sliced_from_table(node, label, window.source) for label, window in windows)
        return node not in self.axes.static and not is_from_table

    def _is_sliced_from_table(self, node: fx.Node, label: AxisLabel, source: AxisLabel) -> bool:
        """Return whether the axis `label` is the sequence, and the axis `source` of which it is a slice is not."""
        labels = self.axes.labels[node]
        return self.axes.sequence_factor(labels[label]) is not None and self.axes.sequence_factor(labels[source]) is None

    def _has_sequence_twice(self, node: fx.Node, operands: Iterable[fx.Node]) -> bool:
        """Return whether a dimension is a product of two sequence axes, `(t t)`, so that rows cannot be sliced."""
        members = self.axes.sequence.members if self.axes.sequence else {}
        shapes = [*map(self.axes.shapes.__getitem__, operands), *self.axes.results[node]]
        products = [factors for shape in shapes for dim in shape if len(factors := self.axes.table.resolve(dim)) > 1]
        return any(sum(factor in members for factor in factors) > 1 for factors in products)

    def _roles(
        self, node: fx.Node, signature: Signature, labels: list[AxisLabel], orientation: dict[tuple[fx.Node, AxisLabel], Role]
    ) -> dict[AxisLabel, Role]:
        """Return the role of each sequence label of an operator: ROWS, KEYS, or WHOLE (all rows are needed at once).

        A label that the operator needs in full is WHOLE, unless a loop can carry its state or select its row. Slices, blocks
        and concatenations are ROWS if a chunk of the result needs the same rows of the operands.
        """
        roles: dict[AxisLabel, Role] = {}
        for label in labels:
            role = orientation.get((node, label), Role.ROWS)
            if label in signature.full_labels and role is Role.ROWS:
                role = Role.ROWS if self._can_run_in_row_order(node, signature, label, labels) else Role.WHOLE
            roles[label] = role
        for label, window in signature.windows.items():
            source = window.source
            if (label in roles) != (source in roles):  # sliced from, or written into, an axis that is not the sequence
                roles[label if label in roles else source] = Role.WHOLE
            elif label in roles and not self._is_row_shift(node, label, source, roles):
                roles[label] = roles[source] = Role.WHOLE
        for label, tile in signature.tiles.items():
            if self._are_aligned_blocks(node, label, tile.source):
                roles[label] = roles[tile.source] = Role.ROWS
        if signature.concat is not None and keeps_row_positions(node, self.axes):
            label, concat = signature.concat
            roles |= dict.fromkeys((label, *(part for part, _ in concat.parts)), Role.ROWS)
        return roles

    def _are_aligned_blocks(self, node: fx.Node, label: AxisLabel, rows: AxisLabel) -> bool:
        """Return whether an operator splits the axis `rows` into blocks (the axis `label`) that chunks contain completely.

        The blocks must start at the axis's first row and cover all of its rows.
        """
        sequence, table = self.axes.sequence, self.axes.table
        outer, inner = (table.resolve(self.axes.labels[node][item]) for item in (label, rows))
        if sequence is None or not len(outer) == len(inner) == 1:
            return False
        if outer[0] not in sequence.blocks or inner[0] in sequence.blocks:
            return False
        have_same_offset = inner[0] in sequence.members and sequence.members[inner[0]].offset == sequence.members[outer[0]].offset
        return have_same_offset and product((table.size(outer[0]), sequence.block(outer[0]))) == table.size(inner[0])

    def _can_run_in_row_order(self, node: fx.Node, signature: Signature, label: AxisLabel, labels: list[AxisLabel]) -> bool:
        """Return whether an operator selects one row, or scans rows in its loop's direction (in backward: reverse)."""
        is_backward = node not in self.joint.forward
        index = signature.index[label]
        is_in_order = isinstance(index, SingleRow) or index == RunningSum(reverse=is_backward)
        has_one_factor = len(self.axes.table.resolve(self.axes.labels[node][label])) == 1  # an index along it is a row index
        return len(labels) == 1 and has_one_factor and is_in_order

    def _is_row_shift(self, node: fx.Node, label: AxisLabel, source: AxisLabel, roles: dict[AxisLabel, Role]) -> bool:
        """Return whether rows of the label `label` are rows of the label `source` at a fixed distance, so that loops can run.

        If the operator has keys, rows must not be shifted: query-by-key values of other chunks are not stored.
        """
        sequence, table = self.axes.sequence, self.axes.table
        result, operand = (table.resolve(self.axes.labels[node][item]) for item in (label, source))
        if sequence is None or len(result) != 1 or len(operand) != 1 or roles[label] is not Role.ROWS:
            return False
        if sequence.block(result[0]) != sequence.block(operand[0]):
            return False
        if Role.KEYS not in roles.values():
            return True
        start = self.axes.signatures[node].windows[label].start
        return bool(start + sequence.members[operand[0]].offset == sequence.members[result[0]].offset)

    def _must_run_unchunked(self, signature: Signature, roles: dict[AxisLabel, Role]) -> bool:
        """Return whether an operator cannot run in a loop: no label is ROWS, or a result's label is WHOLE."""
        if Role.ROWS not in roles.values():
            return True
        result_labels = {label for shape in signature.results for dim in shape for label in dim}
        return any(roles.get(label) is Role.WHOLE for label in result_labels)

    def _storage_class(self, shape: LabelShape, roles: dict[AxisLabel, Role]) -> StorageClass:
        """Return the storage class of a result from its labels' roles; without ROWS, the result is a sum over chunks."""
        present = {roles[label] for dim in shape for label in dim if label in roles}
        if Role.ROWS in present:
            return StorageClass.PAIR if Role.KEYS in present else StorageClass.ROWS
        return StorageClass.KEYSUM if Role.KEYS in present else StorageClass.SUM
