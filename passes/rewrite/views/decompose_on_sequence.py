"""Decompose operators that run along the sequence into operators that loops compute chunk by chunk.

    cat(memory, x)  ->  pad(memory, after) + pad(x, before)          each operand keeps its rows
    norm(x)         ->  sqrt(sum(x * x))
    roll(x)         ->  cat(last rows of x, rows before them)
    x[2:5] = y      ->  where(2 <= arange < 5, pad(y, before and after), x)

The sequence is the axis that loops cut into chunks; rows are its positions. `axes` (`AxisFacts`) says which dimensions of a
value are along it, and which values are static: computed from no input. Along any other axis these operators are not
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import fx

from streamfx.ir.facts import AxisFacts, Facts
from streamfx.ir.joint import (
    JointGraph,
    bound_arguments,
    has_same_type,
    joint_graph,
    node_argument,
    shape_of_node,
    tensor_operands,
)
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.views import slice_start

aten = torch.ops.aten

MAX_CONCAT_OPERANDS = 3  # operands of a concatenation: each of them is padded to the full length


@dataclass(frozen=True)
class DecomposeOnSequence:
    """Decompose the operators that run along the sequence. If the graph changes, its axes are dropped and recomputed."""

    name: ClassVar[str] = "decompose_on_sequence"

    def apply(self, facts: Facts) -> Facts:
        """Decompose the operators along the sequence, in place.

        If the graph changes, the returned facts have no axes: they are then analyzed for the new graph.
        """
        axes = facts.found_axes
        operators = [] if axes is None or axes.sequence is None else _operators_along_sequence(facts.joint, axes)
        return replace(facts, joint=_decompose(facts.joint, operators), found_axes=None) if operators else facts


def _operators_along_sequence(joint: JointGraph, axes: AxisFacts) -> list[fx.Node]:
    """Return the concatenations, norms, rolls and slice writes of computed values along the sequence."""
    tests = {
        aten.cat.default: _is_concat_along_sequence,
        aten.linalg_vector_norm.default: _is_norm_along_sequence,
        aten.roll.default: _is_roll_along_sequence,
        aten.slice_scatter.default: _is_write_along_sequence,
    }
    return [node for node in joint.nodes if node.target in tests and tests[node.target](node, axes)]


def _decompose(joint: JointGraph, nodes: list[fx.Node]) -> JointGraph:
    """Replace the given nodes (`cat`, `roll`, norms and slice writes) by their decompositions; return the new joint graph."""
    writer = GraphWriter(joint.graph)
    emitters: dict[Any, Callable[[fx.Node, GraphWriter], fx.Node]] = {
        aten.cat.default: _emit_padded_sum,
        aten.linalg_vector_norm.default: _emit_norm,
        aten.roll.default: _emit_roll,
        aten.slice_scatter.default: _emit_slice_write,
    }
    for node in nodes:
        emit = emitters[node.target]
        node.replace_all_uses_with(emit(node, writer.move_before(node)), propagate_meta=False)
        joint.graph.erase_node(node)
    return joint_graph(joint.graph, len(joint.primals), len(joint.outputs))


def _is_concat_along_sequence(node: fx.Node, axes: AxisFacts) -> bool:
    """Return whether a `cat` extends one sequence by a few rows: it concatenates at most three values along the sequence.

    One of them must be longer than the others together, and all must be floating point.
    """
    operands: Any = node.args[0]
    dim = bound_arguments(node)["dim"] % len(shape_of_node(node))
    if node in axes.static or len(operands) > MAX_CONCAT_OPERANDS:
        return False
    if not all(_can_be_padded(node, item, dim) for item in operands):
        return False
    lengths = [operand.meta[VALUE].shape[dim] for operand in operands]
    if 2 * max(lengths) <= sum(lengths):  # operands of similar length are separate sequences, not one that is extended
        return False
    return any(_is_along_sequence(value, dim, axes) for value in (node, *operands))


def _is_along_sequence(value: fx.Node, dim: int, axes: AxisFacts) -> bool:
    """Return whether dimension `dim` of a value is the sequence, or a product of it and other axes."""
    return axes.sequence_factor(axes.shapes[value][dim]) is not None


def _can_be_padded(node: fx.Node, operand: fx.Node, dim: int) -> bool:
    """Return whether an operand of a `cat` along `dim`, padded to its result's length, can be added to the other operands.

    It must have the result's dtype, floating point, the result's rank, and a static length.
    """
    operand_value, value = operand.meta[VALUE], node.meta[VALUE]
    return bool(
        operand_value.dtype == value.dtype
        and value.dtype.is_floating_point
        and operand_value.dim() == value.dim()
        and isinstance(operand_value.shape[dim], int)
    )


def _is_norm_along_sequence(node: fx.Node, axes: AxisFacts) -> bool:
    """Return whether a `linalg_vector_norm` is a Euclidean norm in float32 or float64, over the sequence among others."""
    arguments, operand = bound_arguments(node), node_argument(node)
    rank, value = len(shape_of_node(operand)), operand.meta[VALUE]
    if not rank:
        return False
    dims = range(rank) if not arguments["dim"] else [dim % rank for dim in arguments["dim"]]
    return (
        any(_is_along_sequence(operand, dim, axes) for dim in dims)
        and arguments["ord"] == 2
        and arguments["dtype"] is None
        and value.dtype in (torch.float32, torch.float64)
    )


def _is_roll_along_sequence(node: fx.Node, axes: AxisFacts) -> bool:
    """Return whether a `roll` shifts floating-point rows cyclically along the sequence, by a static number."""
    arguments, operand = bound_arguments(node), node_argument(node)
    if len(arguments["dims"]) != 1 or node in axes.static:
        return False
    dim, value = arguments["dims"][0] % len(shape_of_node(operand)), operand.meta[VALUE]
    is_static = isinstance(arguments["shifts"][0], int) and isinstance(value.shape[dim], int)
    return is_static and value.dtype.is_floating_point and _is_along_sequence(operand, dim, axes)


def _is_write_along_sequence(node: fx.Node, axes: AxisFacts) -> bool:
    """Return whether a `slice_scatter` overwrites adjacent rows along the sequence, at a static place."""
    x, rows = tensor_operands(node)
    dim = _written_dim(node)
    length = shape_of_node(node)[dim]
    is_static = isinstance(length, int) and isinstance(shape_of_node(rows)[dim], int) and bound_arguments(node)["step"] == 1
    is_static_write = is_static and has_same_type(x, rows) and slice_start(bound_arguments(node)["start"], length) is not None
    return is_static_write and node not in axes.static and _is_along_sequence(x, dim, axes)


def _written_dim(node: fx.Node) -> int:
    """Return the dimension along which a `slice_scatter` writes, as a nonnegative number."""
    return int(bound_arguments(node)["dim"]) % len(shape_of_node(node))


def _emit_slice_write(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit x[2:5] = rows as where(2 <= arange < 5, padded rows, x).

    It is not a sum, because the overwritten elements of x may be NaN or infinite.
    """
    x, rows = tensor_operands(node)
    dim, rank = _written_dim(node), len(shape_of_node(node))
    length, num_rows = (value.meta[VALUE].shape[dim] for value in (x, rows))
    start = min(slice_start(bound_arguments(node)["start"], length), length)  # type: ignore[type-var]
    end = start + num_rows
    padded_rows = writer.call(aten.constant_pad_nd.default, rows, [0, 0] * (rank - 1 - dim) + [start, length - end], 0)
    indices = writer.call(aten.arange.default, length, device=node.meta[VALUE].device)
    column_of_indices = writer.call(aten.view.default, indices, [-1] + [1] * (rank - 1 - dim))
    is_written = writer.call(
        aten.logical_and.default,
        writer.call(aten.ge.Scalar, column_of_indices, start),
        writer.call(aten.lt.Scalar, column_of_indices, end),
    )
    return writer.call(aten.where.self, is_written, padded_rows, x)


def _emit_roll(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a roll as the concatenation of the last rows and the rows before them; return the operand for a shift by 0 rows."""
    arguments, operand = bound_arguments(node), node_argument(node)
    dim = arguments["dims"][0]
    length = operand.meta[VALUE].shape[dim]
    new_first_row = -arguments["shifts"][0] % max(length, 1)  # the index of the row that becomes row 0
    bounds = (new_first_row, length), (0, new_first_row)
    parts = [writer.rows(operand, dim, start, end) for start, end in bounds]
    return writer.call(aten.cat.default, parts, dim) if new_first_row else operand


def _emit_norm(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a Euclidean norm as the square root of a sum of squares."""
    arguments, operand = bound_arguments(node), node_argument(node)
    dims = arguments["dim"] or list(range(len(shape_of_node(operand))))
    squares = writer.call(aten.mul.Tensor, operand, operand)
    return writer.call(aten.sqrt.default, writer.call(aten.sum.dim_IntList, squares, dims, arguments["keepdim"]))


def _emit_padded_sum(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a concatenation as the sum of its operands, each padded to the length of the result.

    The padding is -0.0, so that adding it keeps the sign of zeros.
    """
    operands: list[fx.Node] = node.args[0]  # type: ignore[assignment]
    rank, dim = len(shape_of_node(node)), bound_arguments(node)["dim"] % len(shape_of_node(node))
    lengths = [operand.meta[VALUE].shape[dim] for operand in operands]
    result_length = sum(lengths)
    offsets = [0, *accumulate(lengths)]  # the row of the result at which each operand starts
    result: fx.Node | None = None
    for operand, offset, length in zip(operands, offsets, lengths, strict=False):
        pad = [0, 0] * (rank - 1 - dim) + [offset, result_length - offset - length]
        padded = writer.call(aten.constant_pad_nd.default, operand, pad, -0.0)
        result = padded if result is None else writer.call(aten.add.Tensor, result, padded)
    assert result is not None
    return result
