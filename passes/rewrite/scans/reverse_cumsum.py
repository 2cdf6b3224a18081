"""Replace flipped prefix reductions by reversed ones, such as the gradient of a cumulative sum."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.dialect.scans import REVERSE_SCANS
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.scans import SCAN_NAMES
from streamfx.passes.rewrite.pattern import op, rewrite_rule

aten = torch.ops.aten


@rewrite_rule(
    op(aten.flip.default, op({*SCAN_NAMES}, op(aten.flip.default, "x", ["dim"]), "dim", dtype=..., name="scan"), ["dim"])
)
def flipped_scan_to_reverse_scan(node: fx.Node, writer: GraphWriter, x: fx.Node, dim: int, scan: fx.Node) -> fx.Node | None:
    """flip(cumsum(flip(x))) -> reverse_cumsum(x)

    Also cumprod and logcumsumexp.
    """
    keeps_dtype = scan.meta[VALUE].dtype == x.meta[VALUE].dtype
    return writer.call(REVERSE_SCANS[SCAN_NAMES[scan.target]], x, dim) if keeps_dtype else None
