"""Find the sequence axis in every dimension of every value.

The analysis walks the graph once. Each operator's rule relates the axes of its operands to those of its results; a
union-find over factored dimensions merges axes that index the same rows. The sequence is then chosen among the axes:
the one that attention runs along; else an axis of the inputs whose rows are ordered and that no parameter has; else
the one along which the most bytes can be chunked. Sizes are never compared to find an axis.

    q [2 37 4 8], k [2 37 2 8]   ->   q [b t h d], k [b t g d]

A dimension (`Dim`) is a tuple of axis factors (`AxisFactor`, an integer): (b, t) for `[(b t)]`, `()` for size one. `AxisTable`
(`table`) unifies factors; `resolve` returns a dimension in its present factors. A rule describes an operator by a `Signature`
of axis labels (`AxisLabel`, local to the operator); `labels[node]` maps its labels to dimensions.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.ir.axis_table import AxisFactor, AxisTable, Dim
from streamfx.ir.facts import AxisFacts, DimAxes, Facts, SequenceAxis
from streamfx.ir.joint import JointGraph, is_parameter, is_tensor, results_of, shape_of_node, tensor_operands
from streamfx.ir.signature import AxisLabel, ConcatAxes, FullAxis, Signature, Tile
from streamfx.ir.sizes import Size, numeric, shape_of
from streamfx.node_meta import FALLBACK_REASON, VALUE
from streamfx.passes.analysis.axis_kinds import (
    factors_of,
    find_feature_axes,
    find_innermost_axes,
    find_input_axes,
    find_ordered_axes,
    static_nodes,
    weight_nodes,
)
from streamfx.passes.analysis.derived_axes import find_derived_axes, find_slice_links, reordered_axes, sequence_of
from streamfx.passes.ops.opaque import describe_opaque, is_opaque, match_operand_dims
from streamfx.passes.ops.rules.registry import RuleCall, evaluate_rule, rule_for
from streamfx.passes.ops.traits import is_random, only_moves_elements, producer_of
from streamfx.runtime.rng import find_seeded_variant

aten = torch.ops.aten

DIFFERENT_ORDERS = "{target} combines operands whose rows are in different orders, or split in different ways"


@dataclass(frozen=True)
class Axes:
    """The pass that finds the axes of every dimension, and the sequence."""

    name: ClassVar[str] = "axes"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the axes of every dimension and the sequence axis."""
        return replace(facts, found_axes=sequence_axes(facts.joint))


def sequence_axes(joint: JointGraph) -> AxisFacts:
    """Return the axes of every dimension, and the sequence among them.

    If a view splits an input dimension into blocks, its axis would be two factors, and no factor would be the sequence. Then
    analyze again with that dimension as one factor, and use the result if it has a sequence.
    """
    axes = axes_of(joint)
    sequence = sequence_axis(joint, axes)
    if split := _split_axes(joint, axes, sequence):
        sequence_dims = frozenset((node, i) for node, i in split if _contains_sequence(sequence, axes, axes.shapes[node][i]))
        split = sequence_dims or split  # a feature axis that is split does not matter if the sequence is split
        axes_unsplit = axes_of(joint, split)  # with each of these dimensions as one factor
        sequence_unsplit = sequence_axis(joint, axes_unsplit)
        inputs = [(node, i) for node in joint.primals for i, _ in enumerate(axes.shapes.get(node, ())) if (node, i) in split]
        input_of_factor = {axes_unsplit.table.resolve(axes_unsplit.shapes[node][i])[0]: (node, i) for node, i in inputs}
        # the chosen axis is not a split input dimension: it may be one within blocks, so use the input dimension
        if sequence_unsplit is None or sequence_unsplit.main not in input_of_factor:
            dims = input_of_factor.items()
            mains = [factor for factor, (node, i) in dims if _contains_sequence(sequence, axes, axes.shapes[node][i])]
            sequence_unsplit = sequence_of(mains[0], axes_unsplit) if mains else None
        if sequence_unsplit is not None:
            axes, sequence = axes_unsplit, sequence_unsplit
    return replace(axes, sequence=sequence)


def _contains_sequence(sequence: SequenceAxis | None, axes: AxisFacts, dim: Dim) -> bool:
    """Return whether the sequence is a factor of a dimension; False without a sequence."""
    return sequence is not None and sequence.main in axes.table.resolve(dim)


def _split_axes(joint: JointGraph, axes: AxisFacts, sequence: SequenceAxis | None) -> frozenset[tuple[fx.Node, int]]:
    """Return (input, dimension) for each input dimension that a view splits into blocks.

    If one is the sequence, its axis must not be factored. The sequence is also returned if a view splits an axis sliced from
    it, or padded around it. An input with the rows of all sequences, [(b t)], is not returned if another input has its
    factors as dimensions, [b t d].
    """
    table = axes.table
    candidates = {
        (node, i): dim
        for node in joint.primals
        if is_tensor(node) and not is_parameter(node)
        for i, dim in enumerate(axes.shapes[node])
        if len(dim) == 1
    }
    unsplit_factors = {factor for dim in candidates.values() for factor in table.resolve(dim) if len(table.resolve(dim)) == 1}
    split = {input_dim for input_dim, dim in candidates.items() if not unsplit_factors.issuperset(table.resolve(dim))}
    if sequence is not None and _has_split_derived_axis(axes, sequence):
        split |= {input_dim for input_dim, dim in candidates.items() if table.resolve(dim) == (sequence.main,)}
    return frozenset(split)


def _has_split_derived_axis(axes: AxisFacts, sequence: SequenceAxis) -> bool:
    """Return whether an axis sliced from the sequence, or padded around it, is factored into several axes."""
    for node, signature in axes.signatures.items():
        for label, window in signature.windows.items():  # axis labels of slices and paddings
            operand, result = (axes.table.resolve(axes.labels[node][item]) for item in (window.source, label))
            if len(operand) == 1 < len(result) and operand[0] in sequence.members:
                return True
    return False


def axes_of(joint: JointGraph, kept: Collection[tuple[fx.Node, int]] = ()) -> AxisFacts:
    """Visit the graph in program order; return the axes of every dimension, without a choice of the sequence.

    `kept`: (input, dimension) pairs that are not factored, nor are axes sliced from them or padded around them.
    """
    table = AxisTable()
    shapes: dict[fx.Node, DimAxes] = {}
    results: dict[fx.Node, tuple[DimAxes, ...]] = {}
    signatures: dict[fx.Node, Signature] = {}
    labels: dict[fx.Node, dict[AxisLabel, Dim]] = {}
    missing_rules: dict[fx.Node, str] = {}
    for node in joint.sources:
        if is_tensor(node):
            shapes[node] = tuple(table.fresh(size) for size in shape_of_node(node))
    for node, i in kept:
        table.keep(shapes[node][i][0])
    for node in joint.nodes:
        if node.target is operator.getitem:
            if is_tensor(node):
                shapes[node] = results[node.args[0]][node.args[1]]  # type: ignore[index]
            continue
        outcome = _apply_rule(node, table, shapes)
        if isinstance(outcome, str):
            missing_rules[node] = outcome
            result_dims = tuple(_unknown_dims(result, producer_of(node), table, shapes) for result in results_of(node))
        else:
            signatures[node], labels[node], result_dims = outcome
        results[node] = result_dims
        if is_tensor(node):
            shapes[node] = result_dims[0]
    _unify_concat_parts(table, signatures, labels)
    return AxisFacts(table, shapes, results, signatures, labels, missing_rules, static_nodes(joint))


def _unify_concat_parts(
    table: AxisTable, signatures: Mapping[fx.Node, Signature], labels: Mapping[fx.Node, Mapping[AxisLabel, Dim]]
) -> None:
    """Unify the axes of operands of different concatenations along one axis that cover the same rows of it.

    For example cat([keys, new keys]) and cat([their mask, its new part]), whose results have one axis.
    """
    first_by_position: dict[tuple[Dim, Size, Size], Dim] = {}
    for node, signature in signatures.items():
        if signature.concat is not None:
            label, concat = signature.concat
            for part, rows_before in concat.parts:
                part_dim = table.resolve(labels[node][part])
                key = table.resolve(labels[node][label]), rows_before, table.size_of_dim(part_dim)
                if len(part_dim) == len(table.resolve(first_part := first_by_position.setdefault(key, part_dim))) == 1:
                    table.unify(part_dim, first_part)


def _unknown_dims(value: torch.Tensor | None, producer: fx.Node, table: AxisTable, shapes: Mapping[fx.Node, DimAxes]) -> DimAxes:
    """Return the axes of a result (a fake tensor) of an operator without a signature; `()` if it is not a tensor.

    New axes; for an opaque operator, which falls back, the axes of an operand's dimensions of equal index and size.
    """
    if value is None:
        return ()
    input_dims = match_operand_dims(value, producer) if is_opaque(producer) else [None] * value.dim()
    pairs = zip(shape_of(value), input_dims, strict=True)
    return tuple(table.fresh(size) if input_dim is None else shapes[input_dim[0]][input_dim[1]] for size, input_dim in pairs)


def _apply_rule(
    node: fx.Node, table: AxisTable, shapes: dict[fx.Node, DimAxes]
) -> tuple[Signature, dict[AxisLabel, Dim], tuple[DimAxes, ...]] | str:
    """Apply an operator's axis rule, and unify the axes of operand dimensions that share a label.

    Return (signature, dimension of each label, dimensions of each result), or a text for the user that says why it has no
    signature. `shapes`: the dimensions of all values before it.
    """
    rule = rule_for(node)
    if rule is None:
        return str(node.meta.get(FALLBACK_REASON) or describe_opaque(node))
    if is_random(node) and (node.kwargs.get("generator") is not None or find_seeded_variant(node.target) is None):
        return f"{node.target} draws from a generator whose state a chunk cannot reproduce"
    call = RuleCall(node, table, shapes)
    signature = evaluate_rule(rule, call)
    if isinstance(signature, str):
        return signature
    bound = dict(signature.factors)  # the dimension of each label
    for operand, label_shape in zip(call.operands, signature.operands, strict=True):
        for dim, label_dim in zip(shapes[operand], label_shape, strict=True):
            if len(label_dim) != 1 or label_dim[0] in signature.factors:
                continue
            first_dim = bound.setdefault(label_dim[0], dim)
            if first_dim != dim and not table.unify(first_dim, dim):
                return DIFFERENT_ORDERS.format(target=node.target)
    result_dims = []
    for result_shape, label_shape in zip(call.result_shapes, signature.results, strict=False):
        for size, label_dim in zip(result_shape, label_shape, strict=True):
            if len(label_dim) == 1 and label_dim[0] not in bound:
                bound[label_dim[0]] = table.fresh(size)
        result_dims.append(tuple([tuple([factor for label in dim for factor in bound[label]]) for dim in label_shape]))
    _keep_derived_axes(signature, bound, table)
    return signature, bound, tuple(result_dims)


def _keep_derived_axes(signature: Signature, bound: dict[AxisLabel, Dim], table: AxisTable) -> None:
    """Mark axes of one operator as indivisible that are sliced from an indivisible axis, or padded around it.

    `bound`: the dimension of each axis label.
    """
    for label, window in signature.windows.items():
        result, operand = table.resolve(bound[label]), table.resolve(bound[window.source])
        if len(result) == len(operand) == 1 and table.is_kept(operand[0]):
            table.keep(result[0])


def sequence_axis(joint: JointGraph, axes: AxisFacts) -> SequenceAxis | None:
    """Return the sequence: the axis of attention, else the axis along which the most bytes can be chunked; None without axes."""
    main = _attention_axis(joint, axes)
    if main is None:
        main = _widest_axis(joint, axes)
    return None if main is None else sequence_of(main, axes)


def _attention_axis(joint: JointGraph, axes: AxisFacts) -> AxisFactor | None:
    """Return the axis that both queries and keys of attention have; None if there is none, or an axis of inputs is longer.

    Fused attention declares it; else it is the axis that occurs twice in scores, masks and probabilities. A square
    weight and its gradient have an axis twice as well, so only values computed in the forward graph count.
    """
    votes: Counter[AxisFactor] = Counter()  # for each axis, how many values or fused attentions have it twice
    for node, signature in axes.signatures.items():
        if not signature.keys:
            continue
        factors = {label: set(axes.table.resolve(dim)) for label, dim in axes.labels[node].items()}
        keys = {factor for label in signature.keys for factor in factors.get(label, ())}
        votes.update(keys & {factor for label, dim in factors.items() if label not in signature.keys for factor in dim})
    if not votes:
        weights = weight_nodes(joint)
        for node in (node for node in joint.nodes if node in joint.forward and node not in weights):
            for shape in axes.results.get(node, ()):
                counts = Counter(factor for dim in shape for factor in axes.table.resolve(dim))
                votes.update(factor for factor, times in counts.items() if times == 2)
    input_axes = find_input_axes(joint, axes)
    ranked = sorted(votes, key=lambda factor: (factor not in input_axes, -votes[factor], factor))
    if not ranked or ranked[0] in input_axes or not input_axes:
        return ranked[0] if ranked else None
    if ranked[0] in find_feature_axes(joint, axes):  # the state of a linear attention has the same width twice
        return None
    sequences = input_axes & find_ordered_axes(axes)  # scores within blocks have the block's axis twice
    longest = max((numeric(axes.table.size(factor)) for factor in sequences), default=0)
    is_long = 2 * numeric(axes.table.size(ranked[0])) >= longest  # rows left over after blocks are few
    return ranked[0] if not sequences or (is_long and ranked[0] in _derived_or_source_axes(sequences, axes)) else None


def _derived_or_source_axes(factors: set[AxisFactor], axes: AxisFacts) -> set[AxisFactor]:
    """Return axis factors, and all axis factors related to them by slices, paddings or concatenations, in either direction."""
    links = [(source, target) for source, target, _, _ in find_slice_links(axes)]
    for node, signature in axes.signatures.items():
        if node.target is aten.cat.default:
            result, *parts = [axes.table.resolve(axes.labels[node].get(label, ())) for label in signature.index]
            # of an operand in blocks, only the axis of blocks is related
            related = {*result, *(factor for part in parts for factor in part[:1])}
            links += [(left, right) for left in related for right in related]
    reached: set[AxisFactor] = set()
    while factors - reached:
        reached |= factors
        factors = {right for link in links for left, right in (link, link[::-1]) if left in reached}
    return reached


def widths(joint: JointGraph) -> Callable[[fx.Node, int], bool]:
    """Return a predicate on (value, dimension): whether it contains a feature axis, which products with weights contract."""
    axes = axes_of(joint)
    feature_axes = find_feature_axes(joint, axes)
    return lambda node, dim: not feature_axes.isdisjoint(axes.table.resolve(axes.shapes[node][dim]))


def _widest_axis(joint: JointGraph, axes: AxisFacts) -> AxisFactor | None:
    """Return the axis along which the most bytes can be chunked; None if there is none.

    Views and results do not count, because chunks do not save their bytes; values along axes derived from it (slices, blocks)
    do. The preference:
    - ordered axes of the inputs, even if an operator needs all their rows. Features are excluded: they are contiguous in
      memory, and their slices are concatenated in another order, as in rotary embeddings;
    - axes that no parameter has and that no operator needs in full;
    - axes along which no random numbers are drawn: without chunks, they are drawn at once, as in eager.
    """
    chunked_elements: dict[AxisFactor, int] = defaultdict(int)
    unsuitable: set[AxisFactor] = set()
    input_axes, ordered = find_input_axes(joint, axes), find_ordered_axes(axes)
    returned = {*joint.outputs, *joint.gradients}
    for node, signature in axes.signatures.items():
        for label in (label for label, index in signature.index.items() if isinstance(index, (FullAxis, Tile, ConcatAxes))):
            unsuitable.update(axes.table.resolve(axes.labels[node].get(label, ())))
        if node not in axes.static:
            is_freed = node not in returned and not only_moves_elements(node)
            for shape in axes.results[node]:
                numel = axes.table.num_elements(shape) if is_freed else 0
                for factor in {factor for dim in shape for factor in axes.table.resolve(dim)}:
                    chunked_elements[factor] += numel
    for node in joint.primals:
        if is_tensor(node) and node.meta[VALUE].is_floating_point() and is_parameter(node):
            unsuitable |= factors_of(node, axes)
    inner = find_innermost_axes(joint, axes)
    sequences = (input_axes & ordered & chunked_elements.keys()) - (inner & reordered_axes(axes))
    candidates = sequences or (chunked_elements.keys() - unsuitable)
    drawn = {factor for node in joint.nodes if is_random(node) and not tensor_operands(node) for factor in factors_of(node, axes)}
    total = {
        factor: sum(chunked_elements.get(member, 0) for member in find_derived_axes(factor, axes)[0]) for factor in candidates
    }
    ranked = sorted(
        candidates,
        key=lambda axis: (axis in unsuitable, axis in drawn, -total[axis], axis in inner, -numeric(axes.table.size(axis)), -axis),
    )
    return ranked[0] if ranked else None
