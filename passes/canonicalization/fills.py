"""Constants without the operand that they were made like."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_size
from streamfx.ir.writer import GraphWriter
from streamfx.passes.canonicalization.equation import equation

aten = torch.ops.aten
FILLED_WITH: dict[Any, Any] = {  # what memory that nobody has written holds is of no use to anybody
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.new_empty_strided.default: 0,
}


@equation(*FILLED_WITH, aten.new_full.default)
def constant_like_another(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """new_zeros(x, shape) -> full(shape, 0)"""
    arguments, own = bound_arguments(node), node.meta["val"]
    fill = FILLED_WITH.get(node.target, arguments.get("fill_value"))
    fill = bool(fill) if own.dtype == torch.bool and not is_size(fill) else fill
    return writer.call(aten.full.default, arguments["size"], fill, dtype=own.dtype, device=own.device)


@equation(aten.fill.Scalar)
def filled(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """fill(x, value) -> full_like(x, value)"""
    return writer.call(aten.full_like.default, *node.args)
