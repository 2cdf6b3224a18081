"""Equations of softmax and of zero, each a simplification of one operator; used by `canonicalize`.

softmax(x - max(x)) -> softmax(x)          sum over keys of a softmax's gradient -> 0
scatter(0, i, 0) -> 0                      x + 0 -> x
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.passes.building import GraphWriter
from streamfx.passes.fillers import is_zero

aten = torch.ops.aten


def _softmax_of_shifted(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """A softmax subtracts the largest score itself."""
    shifted, dim, widened = node.args
    if not isinstance(shifted, fx.Node) or shifted.target is not aten.sub.Tensor or shifted.kwargs:
        return None
    scores, largest = shifted.args
    if not isinstance(largest, fx.Node) or not _is_largest(largest, scores, dim):
        return None
    return writer.call(aten._softmax.default, scores, dim, widened)


def _is_largest(node: fx.Node, scores: Any, dim: Any) -> bool:
    rank = len(shape_of_node(scores))
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (aten.max.dim, aten.amax.default) or node.args[0] is not scores:
        return False
    arguments = bound_arguments(node)
    dims = [arguments["dim"]] if isinstance(arguments["dim"], int) else arguments["dim"]
    return bool(arguments["keepdim"]) and [item % rank for item in dims] == [dim % rank]


def _sum_of_gradients(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """The gradients of the scores of one softmax add up to nothing: probabilities add up to one whatever the scores are."""
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is aten.neg.default:
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten._softmax_backward_data.default:
        return None
    rank, dims = len(shape_of_node(source)), bound_arguments(node)["dim"] or ()
    if bound_arguments(source)["dim"] % rank not in {dim % rank for dim in dims}:
        return None
    value = node.meta["val"]
    return writer.call(aten.full.default, list(value.shape), 0.0, dtype=value.dtype, device=value.device)


def _scattered_nothing(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    target, source = node.args[0], node.args[3]
    return target if is_zero(target) and is_zero(source) else None  # type: ignore[return-value]


def _plus_nothing(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    left, right = node.args[:2]
    if is_zero(left):
        left, right = right, left
    if not is_zero(right) or not is_tensor(left) or "alpha" in node.kwargs:
        return None
    same = left.meta["val"].shape == node.meta["val"].shape and left.meta["val"].dtype == node.meta["val"].dtype  # type: ignore[union-attr]
    return left if same else None  # type: ignore[return-value]


IDENTITIES = {
    aten._softmax.default: _softmax_of_shifted,
    aten.sum.dim_IntList: _sum_of_gradients,
    aten.scatter.src: _scattered_nothing,
    aten.add.Tensor: _plus_nothing,
}
