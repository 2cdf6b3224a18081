"""Bounds on the scores of fused attention, before the mask is added: `Range` is an interval [low, high] for all elements."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.ranges import ACTIVATION_HALF, MAX_ORDINARY, Range, constant, full_range
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.ranges.arithmetic import times
from streamfx.passes.ops.ranges.products import product
from streamfx.passes.ops.ranges.transfer import max_size


def scores_of(node: fx.Node, values: ValueRanges) -> Range:
    """Return the range of the scores scale * (query @ key.T) of a fused attention `node`, given the ranges of its operands.

    The default scale, 1 / sqrt(width), is at most one, so the unscaled range holds. A scale known only at run time: any.
    """
    arguments = bound_arguments(node)
    query, key, scale = (arguments[name] for name in ("query", "key", "scale"))
    dtype = query.meta[VALUE].dtype
    products = product(dtype, max_size(shape_of_node(query)[-1]), values.of(query), values.of(key))
    if scale is None:
        return products
    return times(products, constant(scale)) if isinstance(scale, (int, float)) else full_range(dtype)


def finite_hides(node: fx.Node, values: ValueRanges) -> bool:
    """Return whether a fused attention's scores are so small that a mask's finite fill, such as -1e30, hides a key."""
    is_float16 = bound_arguments(node)["query"].meta[VALUE].dtype == torch.float16
    return scores_of(node, values).magnitude <= (ACTIVATION_HALF if is_float16 else MAX_ORDINARY)
