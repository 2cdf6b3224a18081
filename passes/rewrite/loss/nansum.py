"""Replace a sum that skips NaN, as in `nanmean`, by a sum of values in which NaN is zero: loops accumulate it chunk by chunk."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.pattern import op, rewrite_rule

aten = torch.ops.aten


@rewrite_rule(op(aten.nansum.default, "x", "dim", "keepdim"))
def nansum_to_sum(node: fx.Node, writer: GraphWriter, x: fx.Node, dim: list[int] | None, keepdim: bool) -> fx.Node | None:
    """nansum(x) -> sum(where(isnan(x), 0, x))

    Does not apply if the result has a given dtype: an integer one converts infinities before or after the sum.
    """
    if dim == []:  # the shape that torch traces for it is not that of the result
        return None
    numbers = writer.call(aten.masked_fill.Scalar, x, writer.call(aten.isnan.default, x), 0)
    return writer.call(aten.sum.dim_IntList, numbers, dim, keepdim)
