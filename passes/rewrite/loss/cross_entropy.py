"""Replace a mean over labeled tokens by a sum divided by the label weight: loops accumulate both chunk by chunk.

The label weight is the number of labels that are not ignored, or the sum of their class weights. `nll_loss` returns the
loss and the label weight (in its schema: `total_weight`, an operand of the backward). A sum over all tokens is known only
after the last chunk, so the loss is divided by it after the loop.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, node_argument
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.loss import MEAN, SUM
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(*of_kind(Kind.LABEL_LOSS))
def mean_loss_to_sum(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """mean loss, total weight -> summed loss / label weight, label weight

    Scores of half precision are cast to float32, because a sum may overflow if the mean does not.
    """
    arguments = bound_arguments(node)
    if arguments["reduction"] != MEAN:
        return None
    scores, labels, weight, ignored = (arguments[name] for name in ("self", "target", "weight", "ignore_index"))
    if torch.finfo(_dtype(scores)).max < torch.finfo(torch.float32).max:
        scores, weight = (item and writer.call(aten._to_copy.default, item, dtype=torch.float32) for item in (scores, weight))
    summed_loss = writer.call(operator.getitem, writer.call(node.target, scores, labels, weight, SUM, ignored), 0)
    label_weight = _emit_label_weight(labels, weight, ignored, writer)
    results: list[Any] = [writer.call(aten.div.Tensor, summed_loss, label_weight), label_weight]
    used_getitems = [getitem for getitem in node.users if getitem.users]
    return {item: writer.call(aten._to_copy.default, results[item.args[1]], dtype=_dtype(item)) for item in used_getitems}  # type: ignore[index]


@rewrite_rule(*of_kind(Kind.LABEL_LOSS_BACKWARD))
def mean_loss_backward_to_sum(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """gradient of a mean loss -> gradient of the summed loss, with an incoming gradient that is divided by the total weight"""
    arguments = bound_arguments(node)
    if arguments["reduction"] != MEAN:
        return None
    gradient, total_weight = arguments["grad_output"], arguments["total_weight"]
    # `mean_loss_to_sum` has emitted the weight in float64, and a cast to the traced dtype after it
    is_rounded = total_weight.target is aten._to_copy.default and _dtype(node_argument(total_weight)) == torch.float64
    label_weight = node_argument(total_weight) if is_rounded else total_weight
    scaled = writer.call(aten._to_copy.default, writer.call(aten.div.Tensor, gradient, label_weight), dtype=_dtype(gradient))
    return writer.call(node.target, *{**arguments, "grad_output": scaled, "reduction": SUM}.values())


@rewrite_rule(*of_kind(Kind.LABEL_LOSS_BACKWARD))
def remove_total_weight_of_sum(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """gradient of a summed loss with a total weight -> the same gradient with the constant 1 as total weight

    Only the gradient of a mean reads the total weight. Without this operand, the gradient of a sum does not wait for all
    labels.
    """
    arguments = bound_arguments(node)
    total_weight: fx.Node = arguments["total_weight"]
    if arguments["reduction"] == MEAN or total_weight.target is aten.full.default:
        return None
    unused = writer.call(aten.full.default, [], 1.0, dtype=_dtype(total_weight), device=total_weight.meta[VALUE].device)
    return writer.call(node.target, *{**arguments, "total_weight": unused}.values())


def _emit_label_weight(labels: fx.Node, weight: fx.Node | None, ignored: int, writer: GraphWriter) -> fx.Node:
    """Emit the number of labels that are not ignored, or the sum of their class weights, in float64.

    `weight` has one number per class, or is None; `ignored` is the label that is not counted.
    """
    is_counted = writer.call(aten.ne.Scalar, labels, ignored)
    device = labels.meta[VALUE].device
    if weight is None:
        return writer.call(aten.sum.default, is_counted, dtype=torch.float64)
    zero = writer.call(aten.full.default, [], 0, dtype=torch.int64, device=device)
    safe_labels = writer.call(aten.where.self, is_counted, labels, zero)
    weights = writer.call(aten.index.Tensor, weight, [safe_labels])
    zero_weight = writer.call(aten.full.default, [], 0.0, dtype=_dtype(weight), device=device)
    return writer.call(aten.sum.default, writer.call(aten.where.self, is_counted, weights, zero_weight), dtype=torch.float64)


def _dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of a value."""
    dtype: torch.dtype = node.meta[VALUE].dtype
    return dtype
