"""Remove operators that return their operand: aliases, views of the same shape, full slices.

Views may be removed because nothing writes to the values of the graph, and because an output of the graph is replaced only
by a new tensor (`driver.py`).
"""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, int_argument, is_tensor, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(*of_kind(Kind.ALIAS), aten.lift_fresh_copy.default)
def remove_alias(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """detach(x) -> x"""
    return node_argument(node)


@rewrite_rule(*of_kind(Kind.RESHAPE, Kind.EXPAND))
def remove_view(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """view(x, shape of x) -> x"""
    return _operand_of_same_shape(node)


@rewrite_rule(aten.slice.Tensor, aten.slice_backward.default)
def remove_full_slice(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[:] -> x"""
    return _operand_of_same_shape(node) if bound_arguments(node)["step"] == 1 else None


@rewrite_rule(aten.slice.Tensor)
def remove_sliced_pad(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """pad(x, after)[: length of x] -> x

    Some kernels need an aligned bias, which models build like this.
    """
    arguments, padded = bound_arguments(node), node_argument(node)
    if padded.target is not aten.constant_pad_nd.default or arguments["start"] not in (None, 0) or arguments["step"] != 1:
        return None
    operand, pads, rank = node_argument(padded), list(padded.args[1]), len(shape_of_node(node))  # type: ignore[arg-type]
    # `pads` is (before, after) for each dimension, the last one first
    index_of_pad_after = 2 * (rank - 1 - arguments["dim"] % rank) + 1
    pads_only_after = all(pad == 0 for i, pad in enumerate(pads) if i != index_of_pad_after)
    return operand if pads_only_after and shape_of_node(operand) == shape_of_node(node) else None


@rewrite_rule(aten.constant_pad_nd.default)
def remove_empty_pad(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """pad(x, [0, 0]) -> clone(x)"""
    operand = _operand_of_same_shape(node)
    has_padding = any(pad != 0 for pad in node.args[1])  # type: ignore[union-attr]
    return None if operand is None or has_padding else writer.call(aten.clone.default, operand)


@rewrite_rule(aten.t.default, aten.transpose.int)
def remove_double_transpose(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """t(t(x)) -> x, transpose(transpose(x, i, j), i, j) -> x"""
    inner = node_argument(node)
    return node_argument(inner) if inner.target is node.target and _swapped_dims(inner) == _swapped_dims(node) else None


def _swapped_dims(node: fx.Node) -> set[int]:
    """Return the dimensions that a `transpose` swaps, as nonnegative numbers; the empty set for `t`, which has no arguments."""
    rank = len(shape_of_node(node))
    return {int_argument(node, i) % rank for i in range(1, len(node.args))}


@rewrite_rule(aten.flip.default)
def remove_double_flip(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """flip(flip(x, dims), dims) -> x"""
    inner = node_argument(node)
    return node_argument(inner) if inner.target is aten.flip.default and inner.args[1] == node.args[1] else None


@rewrite_rule(aten.copy.default)
def remove_copy(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """copy(y, x) -> x, if both have one shape; x is converted to the dtype of y"""
    overwritten, value = node.args[:2]
    if not isinstance(value, fx.Node) or not is_tensor(value) or shape_of_node(value) != shape_of_node(node):
        return None
    if has_same_type(value, overwritten):  # type: ignore[arg-type]
        return value
    target = node.meta[VALUE]
    is_moved = value.meta[VALUE].device != target.device
    return None if is_moved else writer.call(aten._to_copy.default, value, dtype=target.dtype)


def _operand_of_same_shape(node: fx.Node) -> fx.Node | None:
    """Return a node's first operand if it has the shape of the node's result; else None."""
    operand = node_argument(node)
    return operand if shape_of_node(operand) == shape_of_node(node) else None
