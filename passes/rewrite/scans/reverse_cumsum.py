"""Replace flipped prefix reductions by reversed ones, such as the gradient of a cumulative sum."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.dialect.scans import REVERSE_SCANS
from streamfx.ir.joint import bound_arguments, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.scans import SCAN_NAMES
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(aten.flip.default)
def flipped_scan_to_reverse_scan(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """flip(cumsum(flip(x))) -> reverse_cumsum(x)

    Also cumprod and logcumsumexp.
    """
    scanned = node_argument(node)
    if scanned.target not in SCAN_NAMES:
        return None
    flipped, rank = scanned.args[0], len(shape_of_node(node))
    if not rank or not isinstance(flipped, fx.Node) or flipped.target is not aten.flip.default:
        return None
    dim = bound_arguments(scanned)["dim"] % rank
    flipped_dims = [[item % rank for item in flip.args[1]] for flip in (node, flipped)]  # type: ignore[union-attr,operator]
    keeps_dtype = scanned.meta[VALUE].dtype == flipped.meta[VALUE].dtype
    if flipped_dims != [[dim], [dim]] or not keeps_dtype:
        return None
    reverse = REVERSE_SCANS[SCAN_NAMES[scanned.target]]
    return writer.call(reverse, flipped.args[0], dim)
