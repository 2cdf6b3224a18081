"""How a value was made of another one, where that says more than the two ranges: the largest of some numbers, their sum."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.node_meta import VALUE

aten = torch.ops.aten
SAME_NUMBERS = frozenset({aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default})


def is_largest_of(largest: Any, numbers: Any) -> bool:
    """Whether each element of `largest` is the largest of those of `numbers` that it is broadcast to."""
    if not isinstance(largest, fx.Node) or not isinstance(numbers, fx.Node):
        return False
    largest = _plain(largest)
    if largest.target is operator.getitem and largest.args[1] == 0:
        largest = largest.args[0]  # type: ignore[assignment]
    if largest.target not in (aten.amax.default, aten.max.dim) or not bound_arguments(largest)["keepdim"]:
        return False
    return _plain(largest.args[0]) is _plain(numbers)


def is_share_of(part: Any, total: Any) -> bool:
    """Whether `total` is at least the sum of `part` along some dimensions, if no element of `part` is negative."""
    if not isinstance(part, fx.Node) or not isinstance(total, fx.Node):
        return False
    total = _plain(total)
    while total.target in _NO_LESS and _NO_LESS[total.target](total):
        total = _plain(total.args[0])
    if total.target is not aten.sum.dim_IntList:
        return False
    arguments = bound_arguments(total)
    return bool(arguments["keepdim"]) and arguments["dtype"] is None and _plain(arguments["self"]) is _plain(part)


def _plain(node: Any) -> Any:
    """The value behind copies of the same type, and behind being repeated."""
    while isinstance(node, fx.Node) and (_is_copy(node) or _is_repeated(node)):
        node = node.args[0]
    return node


def _is_copy(node: fx.Node) -> bool:
    source = node.args[0] if node.target in SAME_NUMBERS else None
    return is_tensor(source) and source.meta[VALUE].dtype == node.meta[VALUE].dtype  # type: ignore[union-attr]


def _is_repeated(node: fx.Node) -> bool:
    """A dimension of size one, repeated: what `keepdim` leaves is broadcast all the same."""
    return node.target is aten.expand.default and len(shape_of_node(node)) == len(shape_of_node(node.args[0]))  # type: ignore[arg-type]


_NO_LESS: dict[Any, Any] = {
    aten.add.Tensor: lambda node: isinstance(node.args[1], (int, float)) and node.args[1] >= 0 and not node.kwargs,
    aten.add.Scalar: lambda node: isinstance(node.args[1], (int, float)) and node.args[1] >= 0 and len(node.args) == 2,
    aten.clamp.default: lambda node: bound_arguments(node)["max"] is None and not isinstance(node.args[1], fx.Node),
    aten.clamp_min.default: lambda node: True,
}
