"""Relations between two values that ranges cannot express: one is the maximum, or the sum, of the other's elements."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.transfer import max_size

aten = torch.ops.aten


def is_largest_of(largest: Any, operand: Any) -> bool:
    """Return whether `largest` is computed as `operand.amax(dims, keepdim=True)` (or `max`), up to copies.

    Then `operand - largest` is at most zero.
    """
    if not isinstance(largest, fx.Node) or not isinstance(operand, fx.Node):
        return False
    largest = _skip_copies(largest)
    if largest.target is operator.getitem and largest.args[1] == 0:
        largest = largest.args[0]  # type: ignore[assignment]
    if largest.target not in (aten.amax.default, aten.max.dim) or not bound_arguments(largest)["keepdim"]:
        return False
    return _skip_copies(largest.args[0]) is _skip_copies(operand)


def normalized_count(operand: Any, scale: Any) -> int | None:
    """Return n if `scale` is computed as `rsqrt(mean(operand^2) + eps)` over n elements, up to copies; else None.

    Then `operand * scale` is at most sqrt(n), up to rounding, unless the square of the operand is too small for its dtype.
    """
    mean = _skip_copies(scale)
    if not isinstance(mean, fx.Node) or mean.target is not aten.rsqrt.default:
        return None
    mean = _skip_growth(mean.args[0])
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim:
        return None
    arguments = bound_arguments(mean)
    square, shape = _skip_copies(arguments["self"]), shape_of_node(node_argument(mean))
    if square.target is not aten.pow.Tensor_Scalar or square.args[1] != 2:
        return None
    is_own_scale = _skip_copies(square.args[0]) is _skip_copies(operand)
    is_per_row = arguments["keepdim"] and arguments["dim"] and arguments["dtype"] is None
    return math.prod(max_size(shape[dim]) for dim in arguments["dim"]) if is_own_scale and is_per_row else None


def is_share_of(part: Any, total: Any) -> bool:
    """Return whether `total` is computed as `part.sum(dims, keepdim=True)`, up to copies, additions of constants and clamps.

    If no element of `part` is negative, `part / total` is then at most one.
    """
    if not isinstance(part, fx.Node) or not isinstance(total, fx.Node):
        return False
    total = _skip_growth(total)
    if total.target is not aten.sum.dim_IntList:
        return False
    arguments = bound_arguments(total)
    return bool(arguments["keepdim"]) and arguments["dtype"] is None and _skip_copies(arguments["self"]) is _skip_copies(part)


def _skip_copies(node: Any) -> Any:
    """Return the value that a chain of copies (of equal dtype) and expansions starts from; other arguments unchanged."""
    while isinstance(node, fx.Node) and (_is_copy(node) or _is_expansion(node)):
        node = node.args[0]
    return node


def _skip_growth(node: Any) -> Any:
    """Return the value that a chain of additions of constants and clamps from below starts from, up to copies."""
    node = _skip_copies(node)
    while isinstance(node, fx.Node) and node.target in _NEVER_DECREASES and _NEVER_DECREASES[node.target](node):
        node = _skip_copies(node.args[0])
    return node


def _is_copy(node: fx.Node) -> bool:
    """Return whether a node copies its operand without changing the dtype."""
    source = node.args[0] if is_kind(node, Kind.CAST, Kind.COPY, Kind.ALIAS) else None
    return is_tensor(source) and source.meta[VALUE].dtype == node.meta[VALUE].dtype  # type: ignore[union-attr]


def _is_expansion(node: fx.Node) -> bool:
    """Return whether a node expands dimensions of size one, and adds none: a result of `keepdim` broadcasts in any case."""
    return node.target is aten.expand.default and len(shape_of_node(node)) == len(shape_of_node(node.args[0]))  # type: ignore[arg-type]


_NEVER_DECREASES: dict[Any, Any] = {  # whether a call returns at least its first operand: x + 1e-6, clamp(x, min)
    aten.add.Tensor: lambda node: isinstance(node.args[1], (int, float)) and node.args[1] >= 0 and not node.kwargs,
    aten.add.Scalar: lambda node: isinstance(node.args[1], (int, float)) and node.args[1] >= 0 and len(node.args) == 2,
    aten.clamp.default: lambda node: bound_arguments(node)["max"] is None and not isinstance(node.args[1], fx.Node),
    aten.clamp_min.default: lambda node: True,
}
