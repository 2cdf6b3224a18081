"""Replace embedding bags of equal length by embeddings and a sum: a bag of k indices is a row of k look-ups.

`nn.EmbeddingBag` flattens its indices [n k] and takes the offset of each bag: 0, k, 2 * k, ... It looks up the rows [d] of
a table, and returns the sum or mean of each bag's rows, [n d]. If the offsets are proven to be multiples of k, they describe
the rows of [n k]. Bags of different lengths, and bags reduced by a maximum, are not chunked. Indices equal to
`padding_idx` do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.sizes import quotient
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import FALLBACK_REASON, VALUE
from streamfx.passes.rewrite.pattern import getitems_by_index, rewrite_rule
from streamfx.passes.rewrite.views.constant_indices import is_strided_arange

aten = torch.ops.aten
SUM, MEAN = 0, 1
MAX_MODE = "has mode='max': with mode='sum' or 'mean' it streams"
UNEQUAL_LENGTHS = "has bags whose lengths may differ: with indices [rows, indices per row], and without offsets, it streams"
SPARSE_GRADIENT = "has a sparse gradient, which depends on all rows: with sparse=False it streams"
FREQUENCY_SCALING = "has a gradient that is divided by the index's frequency in all rows: without scale_grad_by_freq it streams"
LAST_OFFSET = "has include_last_offset=True: without it, bags of equal length stream"


@dataclass(frozen=True)
class _Bags:
    """The operands of n bags with k indices each."""

    indices: fx.Node  # [n k]
    is_counted: fx.Node | None  # [n k]: the mask of indices that are not padding; None: all count
    weights: fx.Node | None  # [n k]: the factor of each looked-up row
    is_mean: bool
    writer: GraphWriter

    def emit_masked_padding(self, values: fx.Node, rank: int) -> fx.Node:
        """Emit the values with zeros for padding indices; `values` are [n k], or [n k d] if `rank` is 3."""
        if self.is_counted is None:
            return values
        value = values.meta[VALUE]
        zero = self.writer.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
        counted = self.writer.call(aten.unsqueeze.default, self.is_counted, 2) if rank == 3 else self.is_counted
        return self.writer.call(aten.where.self, counted, values, zero)

    def emit_mean(self, values: fx.Node) -> fx.Node:
        """Emit values [n d], divided by the number of indices in each bag that are not padding (at least 1).

        Return them unchanged if the bags are sums.
        """
        if not self.is_mean:
            return values
        call = self.writer.call
        if self.is_counted is None:
            return call(aten.div.Tensor, values, size_arguments(self.indices, self.writer)[1])
        num_indices = call(aten.clamp.default, call(aten.sum.dim_IntList, self.is_counted, [1], True), 1)
        return call(aten.div.Tensor, values, call(aten._to_copy.default, num_indices, dtype=values.meta[VALUE].dtype))

    def apply_weights(self, values: fx.Node) -> fx.Node:
        """Emit rows [n k d], times the weights of their indices; return them unchanged if there are no weights."""
        if self.weights is None:
            return values
        return self.writer.call(aten.mul.Tensor, values, self.writer.call(aten.unsqueeze.default, self.weights, 2))


@rewrite_rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag_to_embedding(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """embedding_bag(table, i.view(n * k), arange(0, n * k, k)) -> embedding(table, i).sum(1)"""
    getitems = getitems_by_index(node)
    if not getitems or not any(getitem.users for getitem in getitems.get(0, [])):  # only the bags, result 0, are replaced
        return None
    bags = _emit_bags(node, writer)
    if bags is None:
        return None
    table = bound_arguments(node)["weight"]
    rows = bags.emit_masked_padding(bags.apply_weights(writer.call(aten.embedding.default, table, bags.indices)), 3)
    reduced = bags.emit_mean(writer.call(aten.sum.dim_IntList, rows, [1]))
    return dict.fromkeys(getitems[0], reduced)


@rewrite_rule(aten._embedding_bag_backward.default)
def embedding_bag_backward_to_embedding_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """embedding_bag_backward(d, i.view(n * k), arange(0, n * k, k)) -> embedding_dense_backward(expand(d[:, None], k), i)"""
    bags, arguments = _emit_bags(node, writer), bound_arguments(node)
    if bags is None:
        return None
    bag_gradient = writer.call(aten.unsqueeze.default, bags.emit_mean(arguments["grad"]), 1)  # [n 1 d]
    sizes = [*size_arguments(bags.indices, writer), size_arguments(arguments["grad"], writer)[1]]
    row_gradients = bags.apply_weights(writer.call(aten.expand.default, bag_gradient, sizes))  # [n k d]
    options = arguments["num_weights"], arguments["padding_idx"], False  # False: scale_grad_by_freq
    return writer.call(aten.embedding_dense_backward.default, row_gradients, bags.indices, *options)


@rewrite_rule(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_backward_to_product(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """embedding_bag_per_sample_weights_backward(d, table, i, arange(0, n * k, k)) -> (d[:, None] * embedding(table, i)).sum(2)"""
    bags, arguments = _emit_bags(node, writer), bound_arguments(node)
    if bags is None:
        return None
    looked_up = writer.call(aten.embedding.default, arguments["weight"], bags.indices)
    products = writer.call(aten.mul.Tensor, writer.call(aten.unsqueeze.default, arguments["grad"], 1), looked_up)
    per_index = bags.emit_masked_padding(writer.call(aten.sum.dim_IntList, products, [2]), 2)
    return writer.call(aten.view.default, per_index, size_arguments(arguments["indices"], writer))


def _emit_bags(node: fx.Node, writer: GraphWriter) -> _Bags | None:
    """Emit views [n k] of a bag operator's indices, padding mask and weights, and return them.

    If the operator is not supported, or the lengths of its bags may differ, return None, and record the reason at the node
    (`FALLBACK_REASON`).
    """
    arguments = bound_arguments(node)
    reason = _fallback_reason(arguments)
    if reason is not None:
        node.meta[FALLBACK_REASON] = f"{node.target} {reason}"
        return None
    (num_bags,) = size_arguments(arguments["offsets"], writer)
    indices = writer.call(aten.view.default, arguments["indices"], [num_bags, _bag_length(arguments)])
    padding, weights = arguments["padding_idx"], arguments.get("per_sample_weights")
    is_counted = writer.call(aten.ne.Scalar, indices, padding) if padding >= 0 else None
    if weights is not None:
        weights = writer.call(aten.view.default, weights, [num_bags, _bag_length(arguments)])
    return _Bags(indices, is_counted, weights, arguments["mode"] == MEAN, writer)


def _fallback_reason(arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why a bag operator with these arguments is not rewritten; None if it is."""
    if arguments["mode"] not in (SUM, MEAN):
        return MAX_MODE
    for name, reason in (
        ("sparse", SPARSE_GRADIENT),
        ("scale_grad_by_freq", FREQUENCY_SCALING),
        ("include_last_offset", LAST_OFFSET),
    ):
        if arguments.get(name):
            return reason
    length = _bag_length(arguments)
    return None if length is not None and is_strided_arange(arguments["offsets"], length) else UNEQUAL_LENGTHS


def _bag_length(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of indices per bag if it is the same integer for all bags, else None."""
    (num_indices,), (num_bags,) = (shape_of_node(arguments[name]) for name in ("indices", "offsets"))
    length = quotient(num_indices, num_bags) if num_bags != 0 else None
    return length if isinstance(length, int) and length > 0 else None
