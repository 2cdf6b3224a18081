"""Simplify a softmax of scores minus their maximum, which a softmax subtracts itself.

The second rule removes the gradient that autograd computes for the first rule's maximum. Autograd sums the gradient of the
scores over keys, and writes minus this sum to the largest score of each row, or divides it among equal largest ones. But
probabilities sum to one for any scores, so the gradients of one row's scores sum to zero. Both rules hold up to rounding.
If all scores of a row are minus infinity, or one of them is NaN or infinity, both sides are NaN.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(aten._softmax.default)
def remove_max_before_softmax(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """softmax(x - max(x)) -> softmax(x)"""
    arguments = bound_arguments(node)
    shifted, dim = arguments["self"], arguments["dim"]
    if not isinstance(shifted, fx.Node) or shifted.target is not aten.sub.Tensor:
        return None
    scores, largest, scale = bound_arguments(shifted).values()
    if scale != 1 or not is_tensor(scores) or not is_tensor(largest) or not _is_largest(largest, scores, dim):
        return None
    return writer.call(aten._softmax.default, scores, dim, arguments["half_to_float"])


def _is_largest(node: fx.Node, scores: fx.Node, dim: int) -> bool:
    """Return whether `node` is the maximum of the scores along `dim`, computed with keepdim=True, by `max` or `amax`."""
    rank = len(shape_of_node(scores))
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (aten.max.dim, aten.amax.default) or node.args[0] is not scores:
        return False
    arguments = bound_arguments(node)
    dims = [arguments["dim"]] if isinstance(arguments["dim"], int) else arguments["dim"]
    return bool(rank and arguments["keepdim"]) and [item % rank for item in dims] == [dim % rank]


@rewrite_rule(aten.add.Tensor)
def remove_gradient_of_max(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """d + (minus the sum of d, written to the largest x) -> d, if d is the gradient of the scores of softmax(x)"""
    left, right, scale = bound_arguments(node).values()
    if scale != 1 or not is_tensor(left) or not is_tensor(right):
        return None
    for gradient, max_gradient in ((left, right), (right, left)):
        if (scores := _match_scores(gradient)) is None or shape_of_node(gradient) != shape_of_node(node):
            continue
        if gradient.meta[VALUE].dtype == node.meta[VALUE].dtype and _is_gradient_of_max(max_gradient, gradient, scores):
            return gradient  # type: ignore[no-any-return]
    return None


def _match_scores(gradient: fx.Node) -> fx.Node | None:
    """Return x if `gradient` is the gradient of x in softmax(x), computed by the softmax's backward; else None."""
    if gradient.target is not aten._softmax_backward_data.default:
        return None
    arguments, rank = bound_arguments(gradient), len(shape_of_node(gradient))
    softmax = arguments["output"]
    if softmax.target is not aten._softmax.default or shape_of_node(softmax) != shape_of_node(gradient) or not rank:
        return None
    softmax_arguments = bound_arguments(softmax)
    is_same = softmax_arguments["dim"] % rank == arguments["dim"] % rank and not softmax_arguments["half_to_float"]
    return softmax_arguments["self"] if is_same and arguments["input_dtype"] == softmax.meta[VALUE].dtype else None


def _is_gradient_of_max(node: Any, gradient: fx.Node, scores: fx.Node) -> bool:
    """Return whether a value is the gradient that autograd adds to the scores x for the maximum in x - max(x).

    `gradient` is the gradient of x - max(x). Its sum over keys, plus or minus, is written to one key per row (the backward of
    `max`), or divided among the keys with the largest score (the backward of `amax`):
    scatter(zeros, dim, index, sum), or sum / largest.sum(dim) * largest with largest = (x == max(x)).
    """
    dim = bound_arguments(gradient)["dim"] % len(shape_of_node(gradient))
    if node.target is aten.scatter.src:
        arguments = bound_arguments(node)
        index, gradient_sum = arguments["index"], arguments["src"]
        is_along_keys = arguments["dim"] % len(shape_of_node(node)) == dim and shape_of_node(index) == shape_of_node(gradient_sum)
        return is_along_keys and is_zero(arguments["self"]) and _is_sum(gradient_sum, gradient, dim)
    if node.target is not aten.mul.Tensor:
        return False
    quotient, largest = node.args
    if not is_tensor(quotient) or not is_tensor(largest) or quotient.target is not aten.div.Tensor:
        return False
    gradient_sum, count = quotient.args
    return _is_sum(gradient_sum, gradient, dim) and _is_count(count, largest, dim) and _is_mask_of_largest(largest, scores, dim)


def _is_sum(node: Any, gradient: fx.Node, dim: int) -> bool:
    """Return whether a value is plus or minus the sum of a gradient along `dim`, computed with keepdim=True."""
    if not is_tensor(node) or node.meta[VALUE].dtype != gradient.meta[VALUE].dtype:
        return False
    sum_count = 0
    while node.target in (aten.neg.default, aten.sum.dim_IntList) and node is not gradient:
        if node.target is aten.sum.dim_IntList:
            arguments, rank = bound_arguments(node), len(shape_of_node(gradient))
            if [reduced_dim % rank for reduced_dim in arguments["dim"] or ()] != [dim] or not arguments["keepdim"]:
                return False
            sum_count += 1
        node = node.args[0]
    return node is gradient and sum_count == 1


def _is_count(node: Any, mask: fx.Node, dim: int) -> bool:
    """Return whether a value is the number of True elements of a mask along `dim`, computed with keepdim=True."""
    if not is_tensor(node) or node.target is not aten.sum.dim_IntList or node.args[0] is not mask:
        return False
    arguments, rank = bound_arguments(node), len(shape_of_node(mask))
    is_exact_count = arguments["dtype"] in (None, torch.int64) and arguments["keepdim"]
    return is_exact_count and [item % rank for item in arguments["dim"] or ()] == [dim]


def _is_mask_of_largest(node: fx.Node, scores: fx.Node, dim: int) -> bool:
    """Return whether a value is the mask of the largest scores along `dim`: scores == max(scores)."""
    if node.target is not aten.eq.Tensor:
        return False
    pairs: tuple[tuple[Any, ...], ...] = (node.args, node.args[::-1])
    return any(left is scores and is_tensor(right) and _is_largest(right, scores, dim) for left, right in pairs)
