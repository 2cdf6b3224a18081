"""Type conversions that keep numbers exact: `ValueRanges` knows the interval [low, high] of each value's elements."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.ir.joint import is_tensor, node_argument
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.ranges import is_exact_in
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.analysis import ValueRanges

SAME_SHAPES = of_kind(Kind.CAST, Kind.COPY)
EXACT_COPIES = SAME_SHAPES | of_kind(Kind.RESHAPE, Kind.UNSQUEEZE)


def holds_integers(node: fx.Node, values: ValueRanges) -> bool:
    """Return whether all elements of a value are provably integers, and its dtype represents each integer of their range.

    A floating-point value is proven if copies, casts and views of integers compute it.
    """
    dtype: torch.dtype = node.meta[VALUE].dtype
    value_range = values.of(node)
    if not is_exact_in(dtype, value_range.low, value_range.high):
        return False
    if not dtype.is_floating_point:
        return True
    sources = [source for source in node.all_input_nodes if is_tensor(source)]
    return node.target in EXACT_COPIES and all(holds_integers(source, values) for source in sources)


def keeps_elements(node: fx.Node, values: ValueRanges) -> bool:
    """Return whether a node is a copy, cast or view with the same elements as its operand, in the same order.

    A cast must be of integers, all of which the new dtype represents. False for any other operator.
    """
    if not is_kind(node, Kind.CAST):
        return node.target in EXACT_COPIES
    source, dtype = node_argument(node), node.meta[VALUE].dtype
    source_range = values.of(source)
    return holds_integers(source, values) and is_exact_in(dtype, source_range.low, source_range.high)


def source_of_exact_copies(node: fx.Node, values: ValueRanges, through: frozenset[object] = SAME_SHAPES) -> fx.Node:
    """Return the value whose elements `node` has: follow its first operands through exact copies.

    `through`: the operators that may be followed. Return `node` itself if it is not such a copy.
    """
    while node.target in through and keeps_elements(node, values):
        node = node_argument(node)
    return node
