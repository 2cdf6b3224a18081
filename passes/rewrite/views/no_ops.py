"""Remove operators that return their operand: aliases, views of the same shape, full slices.

Views may be removed because nothing writes to the values of the graph, and because an output of the graph is replaced only
by a new tensor (`driver.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.row_maps import MIN_LOOP_ROWS
from streamfx.passes.rewrite.pattern import either, op, rewrite_rule, tensor

aten = torch.ops.aten
SLICES = of_kind(Kind.SLICE)


@rewrite_rule(*of_kind(Kind.ALIAS), aten.lift_fresh_copy.default)
def remove_alias(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """detach(x) -> x"""
    return node_argument(node)


@rewrite_rule(*of_kind(Kind.RESHAPE, Kind.EXPAND))
def remove_view(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """view(x, shape of x) -> x"""
    return _operand_of_same_shape(node)


@rewrite_rule(*SLICES, aten.slice_backward.default)
def remove_full_slice(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[:] -> x"""
    return _operand_of_same_shape(node) if bound_arguments(node)["step"] == 1 else None


@rewrite_rule(op(aten.select.int, op(aten.stack.default, "parts", ...), "dim", "index"))
def remove_select_of_stack(node: fx.Node, writer: GraphWriter, parts: Sequence[fx.Node], dim: int, index: int) -> fx.Node | None:
    """stack([x, y], dim).select(dim, 1) -> y, but not of a longer stack: its parts may be the rows that a loop reads."""
    rank = len(shape_of_node(node_argument(node)))
    is_part = len(parts) < MIN_LOOP_ROWS and dim % rank == bound_arguments(node_argument(node))["dim"] % rank
    return parts[index] if is_part and has_same_type(parts[index], node) else None


@rewrite_rule(op(SLICES, op(aten.constant_pad_nd.default, "x", "pads", ...), "dim", either(None, 0), ...))
def remove_sliced_pad(node: fx.Node, writer: GraphWriter, x: fx.Node, pads: Sequence[Any], dim: int) -> fx.Node | None:
    """pad(x, after)[: length of x] -> x

    Some kernels need an aligned bias, which models build like this.
    """
    # `pads` is (before, after) for each dimension, the last one first
    index_of_pad_after = 2 * (len(shape_of_node(node)) - 1 - dim) + 1
    pads_only_after = all(pad == 0 for i, pad in enumerate(pads) if i != index_of_pad_after)
    return x if pads_only_after and shape_of_node(x) == shape_of_node(node) else None


@rewrite_rule(op(aten.constant_pad_nd.default, "x", "pads", ...))
def remove_empty_pad(node: fx.Node, writer: GraphWriter, x: fx.Node, pads: Sequence[Any]) -> fx.Node | None:
    """pad(x, [0, 0]) -> clone(x)"""
    return writer.call(aten.clone.default, x) if all(pad == 0 for pad in pads) else None


@rewrite_rule(
    op(aten.t.default, op(aten.t.default, "x")),
    op(aten.transpose.int, op(aten.transpose.int, "x", "i", "j"), "i", "j"),
    op(aten.transpose.int, op(aten.transpose.int, "x", "i", "j"), "j", "i"),
)
def remove_double_transpose(node: fx.Node, writer: GraphWriter, x: fx.Node) -> fx.Node:
    """t(t(x)) -> x, transpose(transpose(x, i, j), i, j) -> x"""
    return x


@rewrite_rule(op(aten.flip.default, op(aten.flip.default, "x", "dims"), "dims"))
def remove_double_flip(node: fx.Node, writer: GraphWriter, x: fx.Node) -> fx.Node:
    """flip(flip(x, dims), dims) -> x"""
    return x


@rewrite_rule(op(aten.copy.default, "y", tensor("x"), ...))
def remove_copy(node: fx.Node, writer: GraphWriter, x: fx.Node, y: fx.Node) -> fx.Node | None:
    """copy(y, x) -> x, if both have one shape; x is converted to the dtype of y"""
    if shape_of_node(x) != shape_of_node(node):
        return None
    if has_same_type(x, y):
        return x
    is_moved = x.meta[VALUE].device != y.meta[VALUE].device
    return None if is_moved else writer.call(aten._to_copy.default, x, dtype=y.meta[VALUE].dtype)


def _operand_of_same_shape(node: fx.Node) -> fx.Node | None:
    """Return a node's first operand if it has the shape of the node's result; else None."""
    operand = node_argument(node)
    return operand if shape_of_node(operand) == shape_of_node(node) else None
