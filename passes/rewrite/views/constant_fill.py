"""Replace constants that copy shape and dtype from a tensor by constants that do not depend on it.

So a chunk of the constant can be computed before, or without, the tensor.
"""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_size, node_argument
from streamfx.ir.operator_table import OPERATORS
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.new_empty_strided.default
)
def new_full_to_full(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """new_zeros(x, shape) -> full(shape, 0)"""  # also new_ones, new_full, and new_empty, which is filled with 0
    arguments, value = bound_arguments(node), node.meta[VALUE]
    fill = arguments.get("fill_value", OPERATORS[node.target].fill or 0)  # uninitialized memory: any value is valid, so use 0
    fill = bool(fill) if value.dtype == torch.bool and not is_size(fill) else fill
    return writer.call(aten.full.default, arguments["size"], fill, dtype=value.dtype, device=value.device)


@rewrite_rule(aten.fill.Scalar, aten.zero.default)
def fill_to_full_like(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """fill(x, value) -> full_like(x, value), zero(x) -> full_like(x, 0)"""
    return writer.call(aten.full_like.default, *node.args, *(() if node.target is aten.fill.Scalar else (0,)))


@rewrite_rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def full_like_of_row_to_full(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """zeros_like(x[:, 0]) -> full(shape, 0)

    The first state of a recurrence is often written like this, and must not depend on x.
    """
    row, value = node_argument(node), node.meta[VALUE]
    fill = find_fill(node)
    if row.target is not aten.select.int or fill is None or not all(isinstance(size, int) for size in value.shape):
        return None
    number: float = fill
    if not value.is_floating_point():
        number = bool(fill) if value.dtype == torch.bool else int(fill)
    return writer.call(aten.full.default, list(value.shape), number, dtype=value.dtype, device=value.device)
