"""Replace unfused attention with a sink (an extra column of scores) by a fused kernel, scaled by the keys' share.

A kernel returns its result and the log-sum-exp of its scores. The sink only adds to this sum:

    softmax(cat([s, k]))[..., :-1] v = out w,   w = exp(lse - total) = sigmoid(lse - k),   total = logaddexp(lse, k)

A kernel's backward recomputes the probabilities as exp(s - lse); with the total instead of lse, they include the sink.
The rest of the backward only uses the result, in sum(gradient * result) per row. So the backward is called with the total
and the scaled result. The sink's gradient is -u sum(gradient * result), u = sigmoid(k - lse).

If a row sees no key, lse is minus infinity and the result is zero, as with the sink. A mask may also hide keys by a large
negative number, in which lse loses its digits: then the sink must take the full sum. So the sink must be proven to be an
ordinary number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.ranges import INFINITY, SWAMPED_BY, SWAMPED_BY_HALF
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges.analysis import ValueRanges
from streamfx.passes.rewrite.attention.softmax_sink import SinkColumn, column_of, converted, fits, is_part
from streamfx.passes.rewrite.attention.unfused_attention import SAME_NUMBERS, Scores, SpelledAttention, through_views
from streamfx.passes.rewrite.pattern import equation

aten = torch.ops.aten


@equation(aten._softmax.default)
def attention_with_a_sink(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """softmax(cat([c q k^T + m, s]))[..., :-1] v -> attention(q, k, v, m, scale=c), scaled by the share of the keys

    Also replaces the gradients of q, k, v and s. Applies if nothing else uses the probabilities or the gradients of
    scores.
    """
    column = column_of(node)
    if column is None or column.dim != 3 or not fits(column) or not _is_ordinary(column.column):
        return None
    found = _attention_around(column)
    return None if found is None else _SinkReplacement(column, found, writer).equals()


def _is_ordinary(sink: fx.Node) -> bool:
    """Whether the sink's range guarantees that masked scores vanish relative to it."""
    least = SWAMPED_BY_HALF if sink.meta[VALUE].dtype == torch.float16 else SWAMPED_BY
    found = ValueRanges().of(sink)
    return least <= found.low and found.high < INFINITY  # if the sink is NaN, so is the result


def _attention_around(column: SinkColumn) -> SpelledAttention | None:
    """Return the attention around a softmax, if its probabilities have no other use."""
    scores = Scores.of(column.scores)
    if scores is None:
        return None
    found = SpelledAttention(scores)
    parts = [user for user in column.softmax.users if is_part(user, column, column.scores_range)]
    own = all(found.takes_probabilities(part) for part in parts)
    backwards = (user for user in column.softmax.users if user not in parts)
    if not own or not all(_takes_gradient(user, column, found) for user in backwards):
        return None
    return found if found.fits_a_kernel() and _is_in_order(found) else None


def _is_in_order(found: SpelledAttention) -> bool:
    """Whether all gradients come after the result and its gradient: this excludes a forward product that looks like a
    gradient.
    """
    return all(found.last_needed < node for node in found.gradients)


def _takes_gradient(backward: fx.Node, column: SinkColumn, found: SpelledAttention) -> bool:
    given = bound_arguments(bound_arguments(backward)["grad_output"])["grad_output"]
    of_scores = (part for part in backward.users if not is_part(part, column, column.column_range))
    return found.is_gradient_of_probabilities(given) and all(map(found.takes_gradient, of_scores))


class _SinkReplacement:
    """Write the fused attention and the sink's share."""

    def __init__(self, column: SinkColumn, found: SpelledAttention, writer: GraphWriter) -> None:
        self.column, self.found, self.writer = column, found, writer
        self.dtype = found.scores.query.meta[VALUE].dtype
        self.precision = torch.promote_types(self.dtype, torch.float32)

    def equals(self) -> dict[fx.Node, fx.Node]:
        found = self.found
        self.forward(self.writer.before(min(found.results)))
        equals = dict(self.given(found.results, self.out))
        of_sink = [part for user in self.column.softmax.users for part in user.users if self.is_of_sink(part, user)]
        if found.gradient is not None and (found.gradients or of_sink):
            equals |= self.backward(self.writer.before(found.last_needed.next), of_sink)
        return equals

    def is_of_sink(self, part: fx.Node, backward: fx.Node) -> bool:
        is_gradient = backward.target is aten._softmax_backward_data.default
        return is_gradient and is_part(part, self.column, self.column.column_range)

    def forward(self, writer: GraphWriter) -> None:
        scores, write = self.found.scores, writer.call
        assert self.found.values is not None
        self.query, self.values = self.heads(scores.query, writer), self.heads(self.found.values, writer)
        self.keys = write(aten.transpose.int, self.heads(scores.keys, writer), 2, 3)
        self.options = {"scale": scores.scale} if scores.mask is None else {"attn_mask": scores.mask, "scale": scores.scale}
        attention = write(ATTENTION, self.query, self.keys, self.values, **self.options)
        out, lse = (converted(writer, write(operator.getitem, attention, i), self.precision) for i in range(2))
        sink = write(aten.squeeze.dim, converted(writer, self.column.column, self.precision), 3)
        self.total = write(aten.logaddexp.default, lse, sink)
        self.rest = write(aten.sigmoid.default, write(aten.sub.Tensor, sink, lse))
        share = write(aten.sigmoid.default, write(aten.sub.Tensor, lse, sink))
        nothing = write(aten.sum.dim_IntList, write(aten.mul.Tensor, self.query, 0), [3])
        share = write(aten.add.Tensor, share, nothing)  # NaN if the query is NaN: the CPU kernel returns zeros
        self.out = converted(writer, write(aten.mul.Tensor, out, write(aten.unsqueeze.default, share, 3)), self.dtype)

    def backward(self, writer: GraphWriter, of_sink: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        found = self.found
        assert found.gradient is not None
        gradient = self.heads(found.gradient, writer)
        given = gradient, self.query, self.keys, self.values, self.out, self.total
        gradients = writer.call(ATTENTION_BACKWARD, *given, **self.options)
        of_query, of_key, of_value = (writer.call(operator.getitem, gradients, i) for i in range(3))
        transposed = writer.call(aten.transpose.int, of_key, 2, 3)
        pairs = (
            (found.of_query, of_query),
            (found.of_keys, of_key),
            (found.of_keys_turned, transposed),
            (found.of_values, of_value),
        )
        equals = dict(pair for nodes, value in pairs for pair in self.given(nodes, value))
        return equals | dict.fromkeys(of_sink, self.gradient_of_sink(gradient, writer))

    def gradient_of_sink(self, gradient: fx.Node, writer: GraphWriter) -> fx.Node:
        wide = (converted(writer, item, self.precision) for item in (gradient, self.out))
        inner = writer.call(aten.sum.dim_IntList, writer.call(aten.mul.Tensor, *wide), [3])
        product = writer.call(aten.mul.Tensor, writer.call(aten.neg.default, self.rest), inner)
        return converted(writer, writer.call(aten.unsqueeze.default, product, 3), self.column.column.meta[VALUE].dtype)

    def heads(self, node: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value [bh m d] as [b h m d]: the value that was flattened, if there is one, else a view."""
        source, folded = through_views(node), shape_of_node(self.column.scores)[:2]
        if shape_of_node(source) == (*folded, *shape_of_node(node)[1:]):
            return source
        sizes = [*size_arguments(self.column.scores, writer)[:2], *size_arguments(node, writer)[1:]]
        return writer.call(aten.view.default, node, sizes)

    def given(self, nodes: Iterable[fx.Node], replacement: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Map products [bh m d], and their views [b h m d], to a replacement [b h m d]."""
        for node in nodes:
            views = [
                user for user in node.users if user.target in SAME_NUMBERS and shape_of_node(user) == shape_of_node(replacement)
            ]
            yield from ((view, replacement) for view in views)
            if len(views) < len(node.users):
                contiguous = self.writer.call(aten.clone.default, replacement, memory_format=torch.contiguous_format)
                yield node, self.writer.call(aten.view.default, contiguous, size_arguments(node, self.writer))
