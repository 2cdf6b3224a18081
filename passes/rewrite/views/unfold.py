"""Decompose sliding windows with step 1: each position within the window is a slice.

The windows of size 3 of n rows are n - 2 windows; position i of all windows together are rows [i, i + n - 2).
"""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, node_argument
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.decompositions import WIDEST
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(aten.unfold.default)
def unfold_to_stack(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """unfold(x, dim, 3, 1) -> stack([x[0 : n - 2], x[1 : n - 1], x[2 : n]])"""
    arguments, value = bound_arguments(node), node.args[0].meta[VALUE]  # type: ignore[union-attr]
    dim, size = arguments["dimension"] % max(value.dim(), 1), arguments["size"]
    length = value.shape[dim] if value.dim() else 1
    if arguments["step"] != 1 or not isinstance(length, int) or not 1 < size <= min(WIDEST, length):
        return None
    num_windows = length - size + 1
    rows = [writer.rows(node_argument(node), dim, i, i + num_windows) for i in range(size)]
    return writer.call(aten.stack.default, rows, value.dim())


@rewrite_rule(aten.unfold_backward.default)
def unfold_backward_to_slice_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """unfold_backward(d) -> the sum over window positions of the gradient, padded to that position's rows"""
    arguments = bound_arguments(node)
    sizes, dim, size = arguments["input_sizes"], arguments["dim"] % max(len(arguments["input_sizes"]), 1), arguments["size"]
    if arguments["step"] != 1 or not isinstance(sizes[dim], int) or not 1 < size <= min(WIDEST, sizes[dim]):
        return None
    num_windows = sizes[dim] - size + 1
    gradient: fx.Node | None = None
    for i in range(size):  # the last dimension of `grad_in` has the positions within a window
        rows = writer.call(aten.select.int, arguments["grad_in"], len(sizes), i)
        padded = writer.call(aten.slice_backward.default, rows, sizes, dim, i, i + num_windows, 1)
        gradient = padded if gradient is None else writer.call(aten.add.Tensor, gradient, padded)
    return gradient
