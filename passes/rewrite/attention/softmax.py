"""Simplify a softmax of scores minus their maximum, which a softmax subtracts itself.

The second rule removes the gradient that autograd computes for the first rule's maximum. Autograd sums the gradient of the
scores over keys, and writes minus this sum to the largest score of each row, or divides it among equal largest ones. But
probabilities sum to one for any scores, so the gradients of one row's scores sum to zero. Both rules hold up to rounding.
If all scores of a row are minus infinity, or one of them is NaN or infinity, both sides are NaN.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from streamfx.ir.joint import shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import Through, Where, either, op, rewrite_rule

aten = torch.ops.aten

LARGEST = either(
    op(aten.amax.default, "scores", ["dim"], True),
    op(operator.getitem, op(aten.max.dim, "scores", "dim", True), 0),
)
# the gradient of the scores: with the softmax's own backward, which reads its result
SCORES_GRADIENT = op(
    aten._softmax_backward_data.default,
    ...,
    op(aten._softmax.default, "scores", "dim", False, name="softmax"),
    "dim",
    "softmax_dtype",
    name="gradient",
)
# plus or minus the sum of the gradient over keys
SUM = Through(
    {aten.neg.default},
    op(aten.sum.dim_IntList, Through({aten.neg.default}, "gradient"), ["dim"], True, dtype=..., name="gradient_sum"),
)
# the backward of `max` writes the sum to one key per row; the backward of `amax` divides it among the largest scores
IS_LARGEST = op(aten.eq.Tensor, "scores", LARGEST, name="is_largest")
GRADIENT_OF_MAX = either(
    op(aten.scatter.src, Where(is_zero, ...), "dim", "index", SUM),
    op(
        aten.mul.Tensor,
        op(aten.div.Tensor, SUM, op(aten.sum.dim_IntList, "is_largest", ["dim"], True, dtype=either(None, torch.int64))),
        IS_LARGEST,
    ),
)


@rewrite_rule(op(aten._softmax.default, op(aten.sub.Tensor, "scores", LARGEST), "dim", ...))
def remove_max_before_softmax(node: fx.Node, writer: GraphWriter, scores: fx.Node) -> fx.Node:
    """softmax(x - max(x)) -> softmax(x)"""
    return writer.call(aten._softmax.default, scores, *node.args[1:], **node.kwargs)


@rewrite_rule(op(aten.add.Tensor, SCORES_GRADIENT, GRADIENT_OF_MAX))
def remove_gradient_of_max(
    node: fx.Node,
    writer: GraphWriter,
    gradient: fx.Node,
    softmax: fx.Node,
    softmax_dtype: torch.dtype,
    gradient_sum: fx.Node,
    index: fx.Node | None = None,
) -> fx.Node | None:
    """d + (minus the sum of d, written to the largest x) -> d, if d is the gradient of the scores of softmax(x)"""
    shape, dtype = shape_of_node(gradient), gradient.meta[VALUE].dtype
    has_one_shape = shape == shape_of_node(node) == shape_of_node(softmax) and bool(shape)
    has_one_dtype = {node.meta[VALUE].dtype, gradient_sum.meta[VALUE].dtype} == {dtype} and softmax_dtype == softmax.meta[
        VALUE
    ].dtype
    writes_full_sum = index is None or shape_of_node(index) == shape_of_node(gradient_sum)
    return gradient if has_one_shape and has_one_dtype and writes_full_sum else None
