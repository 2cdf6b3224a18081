"""Kinds of axes and values, from which the axis analysis chooses the sequence: features, ordered axes, static values, weights.

An axis is identified by an axis factor (`AxisFactor`, an integer); `axes` holds the factors of each dimension of each value,
and the `Signature` of each operator, whose axis labels (`AxisLabel`) `axes.labels[node]` maps to axis factors.
"""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.axis_table import AxisFactor
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import JointGraph, is_parameter, is_tensor, tensor_operands
from streamfx.ir.operator_table import OPERATORS
from streamfx.ir.signature import RunningSum
from streamfx.node_meta import VALUE
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.traits import is_random, only_moves_elements
from streamfx.torch_private.graph_nodes import operands_of

aten = torch.ops.aten

BY_POSITION = frozenset(operator for operator, record in OPERATORS.items() if record.by_position)


def static_nodes(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the *static* values: they depend only on inputs that are integers, booleans or vectors, and on constants.

    Masks, rotary tables and labels are static. They are cheap to compute in full if they have one sequence dimension.
    """
    static = {node for node in joint.sources if node not in joint.tangents and (not is_tensor(node) or _is_static_input(node))}
    for node in joint.nodes:
        if static.issuperset(operands_of(node)) and not (is_random(node) or is_collective(node)):
            static.add(node)  # values of other ranks depend on more than this rank's integers
    return frozenset(static)


def _is_static_input(node: fx.Node) -> bool:
    """Return whether an input is of integers or booleans, or has at most one dimension of more than one element."""
    value: torch.Tensor = node.meta[VALUE]
    is_vector = sum(not isinstance(size, int) or size != 1 for size in value.shape) <= 1
    return not (value.is_floating_point() or value.is_complex()) or is_vector


def weight_nodes(joint: JointGraph) -> frozenset[fx.Node]:
    """Return floating-point inputs, values computed from parameters alone, and views or copies of any of them."""
    inputs = {node for node in joint.primals if is_tensor(node) and node.meta[VALUE].is_floating_point()}
    weights, parameters = set(inputs), {node for node in inputs if is_parameter(node)}
    for node in joint.nodes:
        sources = [source for source in node.all_input_nodes if is_tensor(source)]
        if sources and all(source in parameters for source in sources):
            parameters.add(node)
        if node in parameters or (only_moves_elements(node) and sources[0] in weights):
            weights.add(node)
    return frozenset(weights)


def find_input_axes(joint: JointGraph, axes: AxisFacts) -> set[AxisFactor]:
    """Return the axes of inputs (not parameters) that no product with a weight contracts: batch and sequence."""
    inputs = (node for node in joint.inputs if is_tensor(node) and not is_parameter(node))
    return {factor for node in inputs for factor in factors_of(node, axes)} - find_feature_axes(joint, axes)


def find_feature_axes(joint: JointGraph, axes: AxisFacts) -> set[AxisFactor]:
    """Return the axes of weights that forward products contract: the widths of features.

    Axes along which a weight is expanded are excluded: a softmax sink, for example, is expanded along rows.
    """
    parameters = {node for node in joint.primals if is_tensor(node) and is_parameter(node)}
    features: set[AxisFactor] = set()
    expanded: set[AxisFactor] = set()
    for node in (node for node in joint.nodes if node in joint.forward):
        operands = tensor_operands(node)
        if operands and all(operand in parameters for operand in operands):
            parameters.add(node)
            expanded |= factors_of(node, axes) - factors_of(operands[0], axes) if node.target is aten.expand.default else set()
        elif (signature := axes.signatures.get(node)) is not None and signature.results[0]:
            contracted = signature.contracted_labels()
            for operand, shape in zip(operands, signature.operands, strict=True):
                if operand in parameters and any(label in contracted for dim in shape for label in dim):
                    features |= factors_of(operand, axes) - expanded
    return features


def factors_of(node: fx.Node, axes: AxisFacts) -> set[AxisFactor]:
    """Return all axis factors of a value's dimensions."""
    return {factor for dim in axes.shapes[node] for factor in axes.table.resolve(dim)}


def find_ordered_axes(axes: AxisFacts) -> set[AxisFactor]:
    """Return the axes whose rows have an order, because an operator depends on their positions: sequences, not batches."""
    ordered: set[AxisFactor] = set()
    for node, signature in axes.signatures.items():
        labels = {item for label, window in signature.windows.items() for item in (label, window.source)}
        labels |= {label for label, index in signature.index.items() if isinstance(index, RunningSum)}
        labels |= signature.full_labels if node.target in BY_POSITION else set()
        ordered |= {factor for label in labels for factor in axes.table.resolve(axes.labels[node].get(label, ()))}
    return ordered


def find_innermost_axes(joint: JointGraph, axes: AxisFacts) -> set[AxisFactor]:
    """Return the axes that are innermost in inputs, and nowhere else: their slices would not be contiguous in memory."""
    inputs = [node for node in joint.primals if is_tensor(node) and node.meta[VALUE].is_floating_point()]
    shapes = [axes.shapes[node] for node in inputs if len(axes.shapes[node]) > 1]
    last, others = (
        {factor for dim in dims for factor in axes.table.resolve(dim)}
        for dims in ([shape[-1] for shape in shapes], [dim for shape in shapes for dim in shape[:-1]])
    )
    return last - others
