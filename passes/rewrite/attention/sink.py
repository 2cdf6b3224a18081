"""Replace unfused attention with a sink (an extra column of scores) by a fused kernel, scaled by the keys' share.

Unfused attention is the products and the softmax as separate operators. The sink k is one more score per row, and is
dropped after the softmax: it only takes a share of the probabilities. A kernel returns its result and the log-sum-exp of
its scores. The sink only adds to this sum:

    softmax(cat([s, k]))[..., :-1] v = out w,   w = exp(lse - total_lse) = sigmoid(lse - k),   total_lse = logaddexp(lse, k)

A kernel's backward recomputes the probabilities as exp(s - lse); with `total_lse` instead of lse, they include the sink.
The rest of the backward only uses the result, in sum(gradient * result) per row. So the backward is called with the total
and the scaled result. The sink's gradient is -u sum(gradient * result), u = sigmoid(k - lse).

If a row sees no key, lse is minus infinity and the result is zero, as in the unfused form. A mask may also hide keys by a
large negative number. Then lse has lost its digits, and is only correct if it vanishes next to the sink. So the sink must
be proven to be an ordinary number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import shape_of_node
from streamfx.ir.ranges import INFINITY, VISIBLE_SCORE, VISIBLE_SCORE_HALF
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.analysis import ValueRanges
from streamfx.passes.rewrite.attention.softmax_sink import (
    SinkColumn,
    emit_cast,
    has_only_matched_uses,
    incoming_gradient,
    is_slice_of,
    match_sink_column,
)
from streamfx.passes.rewrite.attention.unfused_attention import KEEPS_ELEMENTS, UnfusedAttention, before_views, match_attention
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@rewrite_rule(aten._softmax.default)
def softmax_with_sink_to_attention(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """softmax(cat([c q k^T + m, s]))[..., :-1] v -> attention(q, k, v, m, scale=c), scaled by the share of the keys

    Also replaces the gradients of q, k, v and s. Applies if nothing else uses the probabilities or the gradients of
    scores.
    """
    column = match_sink_column(node)
    if column is None or column.dim != 3 or not has_only_matched_uses(column) or not _has_ordinary_range(column.column):
        return None
    attention = _match_attention(column)
    return None if attention is None else _SinkReplacement(column, attention, writer).replacements()


def _has_ordinary_range(sink: fx.Node) -> bool:
    """Return whether the sink is proven to be an ordinary number: finite, and at least about -1e28.

    Then exp(score - sink) is zero for scores that a mask has set to a huge negative number.
    """
    lower_bound = VISIBLE_SCORE_HALF if sink.meta[VALUE].dtype == torch.float16 else VISIBLE_SCORE
    value_range = ValueRanges().of(sink)
    return lower_bound <= value_range.low and value_range.high < INFINITY  # if the sink is NaN, so is the result


def _match_attention(column: SinkColumn) -> UnfusedAttention | None:
    """Match the products before and after a softmax with a sink, and their gradients.

    Return None if the scores are not c q k^T + m, if the probabilities or the gradients have another use, or if no kernel
    fits the operands. All gradients must come after the result and its gradient in the graph: the replacement computes them
    together, after these two, and a product that comes earlier belongs to the forward graph.
    """
    backwards = [user for user in column.softmax.users if not is_slice_of(user, column, column.scores_range)]
    attention = match_attention(
        column.scores,
        probabilities=[user for user in column.softmax.users if user not in backwards],
        probability_gradients=[incoming_gradient(backward) for backward in backwards],
        scores_gradients=[
            part for backward in backwards for part in backward.users if is_slice_of(part, column, column.scores_range)
        ],
    )
    if attention is None or not attention.fits_kernel():
        return None
    return attention if all(attention.last_needed < node for node in attention.gradients) else None


class _SinkReplacement:
    """Emits the fused attention and the sink's share of the softmax.

    `column` is the softmax of scores and sink, `attention` the products around it, with operands [bh m d].
    """

    def __init__(self, column: SinkColumn, attention: UnfusedAttention, writer: GraphWriter) -> None:
        """Store the match, the dtype of the operands, and the dtype for log-sum-exps and shares (at least float32)."""
        self.column, self.attention, self.writer = column, attention, writer
        self.dtype = attention.query.meta[VALUE].dtype
        self.precision = torch.promote_types(self.dtype, torch.float32)

    def replacements(self) -> dict[fx.Node, fx.Node]:
        """Emit forward and backward, and return the replacements of the products, their gradients and the sink's gradient."""
        attention = self.attention
        self.forward(self.writer.move_before(min(attention.results)))
        replacements = dict(self.map_results(attention.results, self.out))
        sink_gradients = [
            slice_ for user in self.column.softmax.users for slice_ in user.users if self.is_sink_gradient(slice_, user)
        ]
        if attention.gradient is not None and (attention.gradients or sink_gradients):
            replacements |= self.backward(self.writer.move_before(attention.last_needed.next), sink_gradients)
        return replacements

    def is_sink_gradient(self, slice_: fx.Node, backward: fx.Node) -> bool:
        """Return whether a node is the sink's gradient: the sink's column of `backward`, if that is a softmax backward."""
        is_gradient = backward.target is aten._softmax_backward_data.default
        return is_gradient and is_slice_of(slice_, self.column, self.column.column_range)

    def forward(self, writer: GraphWriter) -> None:
        """Emit the attention operator, and store what the replacements read.

        `out` is the result, scaled by the keys' share sigmoid(lse - sink); `total_lse` the log-sum-exp with the sink, which the
        backward reads; `sink_share` is sigmoid(sink - lse). All operands have the shape [b h m d].
        """
        matched, write = self.attention, writer.call
        self.query, self.values = self.emit_with_heads(matched.query, writer), self.emit_with_heads(matched.values, writer)
        self.keys = write(aten.transpose.int, self.emit_with_heads(matched.keys, writer), 2, 3)
        self.options = {"scale": matched.scale} if matched.mask is None else {"attn_mask": matched.mask, "scale": matched.scale}
        attention = write(ATTENTION, self.query, self.keys, self.values, **self.options)
        out, lse = (emit_cast(writer, write(operator.getitem, attention, i), self.precision) for i in range(2))
        sink = write(aten.squeeze.dim, emit_cast(writer, self.column.column, self.precision), 3)
        self.total_lse = write(aten.logaddexp.default, lse, sink)
        self.sink_share = write(aten.sigmoid.default, write(aten.sub.Tensor, sink, lse))
        share = write(aten.sigmoid.default, write(aten.sub.Tensor, lse, sink))
        zero_or_nan = write(aten.sum.dim_IntList, write(aten.mul.Tensor, self.query, 0), [3])
        share = write(aten.add.Tensor, share, zero_or_nan)  # NaN if the query is NaN: the CPU kernel returns zeros
        self.out = emit_cast(writer, write(aten.mul.Tensor, out, write(aten.unsqueeze.default, share, 3)), self.dtype)

    def backward(self, writer: GraphWriter, sink_gradients: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Emit the attention's backward, and return the replacements of all gradients, of operands and of the sink."""
        attention = self.attention
        assert attention.gradient is not None
        gradient = self.emit_with_heads(attention.gradient, writer)
        operands = gradient, self.query, self.keys, self.values, self.out, self.total_lse
        gradients = writer.call(ATTENTION_BACKWARD, *operands, **self.options)
        query_gradient, key_gradient, value_gradient = (writer.call(operator.getitem, gradients, i) for i in range(3))
        transposed = writer.call(aten.transpose.int, key_gradient, 2, 3)
        pairs = (
            (attention.query_gradients, query_gradient),
            (attention.key_gradients, key_gradient),
            (attention.transposed_key_gradients, transposed),
            (attention.value_gradients, value_gradient),
        )
        replacements = dict(pair for nodes, value in pairs for pair in self.map_results(nodes, value))
        return replacements | dict.fromkeys(sink_gradients, self.emit_sink_gradient(gradient, writer))

    def emit_sink_gradient(self, gradient: fx.Node, writer: GraphWriter) -> fx.Node:
        """Emit the sink's gradient [b h m 1]: minus its share times the sum of gradient times result, per row.

        `gradient` is the gradient of the attention's result, [b h m d].
        """
        wide = (emit_cast(writer, item, self.precision) for item in (gradient, self.out))
        row_sums = writer.call(aten.sum.dim_IntList, writer.call(aten.mul.Tensor, *wide), [3])
        product = writer.call(aten.mul.Tensor, writer.call(aten.neg.default, self.sink_share), row_sums)
        return emit_cast(writer, writer.call(aten.unsqueeze.default, product, 3), self.column.column.meta[VALUE].dtype)

    def emit_with_heads(self, node: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value [bh m d] as [b h m d]: the operand of the view that flattened it, or else a new view."""
        unflattened = before_views(node)
        batch_and_heads = shape_of_node(self.column.scores)[:2]
        if shape_of_node(unflattened) == (*batch_and_heads, *shape_of_node(node)[1:]):
            return unflattened
        sizes = [*size_arguments(self.column.scores, writer)[:2], *size_arguments(node, writer)[1:]]
        return writer.call(aten.view.default, node, sizes)

    def map_results(self, nodes: Iterable[fx.Node], replacement: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield (old node, new node) for products [bh m d] that a replacement [b h m d] replaces.

        A view of a product with the replacement's shape is replaced directly. For other users of the product, emit a copy of
        the replacement that is flattened to the product's shape.
        """
        for node in nodes:
            views = [
                user for user in node.users if user.target in KEEPS_ELEMENTS and shape_of_node(user) == shape_of_node(replacement)
            ]
            yield from ((view, replacement) for view in views)
            if len(views) < len(node.users):
                contiguous = self.writer.call(aten.clone.default, replacement, memory_format=torch.contiguous_format)
                yield node, self.writer.call(aten.view.default, contiguous, size_arguments(node, self.writer))
