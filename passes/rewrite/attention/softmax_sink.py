"""Rewrite a softmax over keys and one extra column that is dropped afterwards (an attention sink) without that column.

The last axis of scores with an extra column is not the axis of keys. But a softmax over two slices is the softmax of each
slice, times this slice's share of the sum, and the shares are a softmax of two numbers:

    softmax(cat([s, k]))[..., :-1] = softmax(s) * w,   w, u = softmax([logsumexp(s - k), 0])

If a row sees no key, all its scores are minus infinity and w is zero. The result must then be zero, as with the column;
softmax(s) times zero would be NaN. The backward is also rewritten: with p = softmax(s) * w and its gradient g, the
gradient of the scores is p * (g - sum(g * p)), and the gradient of the column is -u * sum(g * p). u is computed
separately, because 1 - w loses its digits if the column's share is small. Nothing is rewritten unless all uses match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from streamfx.ir.joint import node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.row_maps import RowMove, row_read, row_write
from streamfx.passes.rewrite.pattern import op, rewrite_rule

aten = torch.ops.aten

SOFTMAX_OF_PAIR = op(aten._softmax.default, op(aten.cat.default, ["first", "second"], "dim"), "dim", False)
BACKWARD = op(
    aten._softmax_backward_data.default, op(aten.slice_backward.default, *[...] * 6, name="padded"), "softmax", "dim", "dtype"
)


@dataclass(frozen=True)
class SinkColumn:
    """The softmax of scores [.. n] and one extra column [.. 1], concatenated along `dim`, the dimension of keys.

    `scores_start` is 0 if the column comes after the scores, 1 if it comes before.
    """

    softmax: fx.Node
    scores: fx.Node
    column: fx.Node
    dim: int
    scores_start: int

    @property
    def scores_range(self) -> tuple[int, int]:
        """Return the start and end of the scores in the concatenation."""
        num_keys = shape_of_node(self.scores)[self.dim]
        assert isinstance(num_keys, int)
        return self.scores_start, self.scores_start + num_keys

    @property
    def column_range(self) -> tuple[int, int]:
        """Return the start and end of the extra column in the concatenation."""
        end = self.scores_range[1]
        return (end, end + 1) if self.scores_start == 0 else (0, 1)


@rewrite_rule(aten._softmax.default)
def softmax_with_sink_to_softmax(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """softmax(cat([s, k]))[..., :-1] -> softmax(s) * w,  w, u = softmax([logsumexp(s - k), 0])"""
    match = match_sink_column(node)
    return _emit_without_column(match, writer) if match is not None and has_only_matched_uses(match) else None


def match_sink_column(softmax: fx.Node) -> SinkColumn | None:
    """Match a softmax of scores that are concatenated, along the softmax's dimension, with one extra column (size 1).

    Return None if its operand is not such a concatenation.
    """
    match = SOFTMAX_OF_PAIR.match(softmax)
    if match is None:
        return None
    pair, dim, rank = (match["first"], match["second"]), match["dim"], len(shape_of_node(softmax))
    if any(len(shape_of_node(operand)) != rank for operand in pair):
        return None
    lengths = [shape_of_node(operand)[dim] for operand in pair]
    if not all(isinstance(length, int) for length in lengths) or (lengths[0] == 1) == (lengths[1] == 1):
        return None
    scores_index = 0 if lengths[1] == 1 else 1
    return SinkColumn(softmax, pair[scores_index], pair[1 - scores_index], dim, scores_index)


def has_only_matched_uses(column: SinkColumn) -> bool:
    """Return whether all uses of the softmax are a slice without the column, or its backward.

    All uses of the backward's result must slice either the gradient of the scores or the gradient of the column.
    """
    return all(is_slice_of(user, column, column.scores_range) or _is_backward(user, column) for user in column.softmax.users)


def is_slice_of(node: fx.Node, column: SinkColumn, columns: tuple[int, int]) -> bool:
    """Return whether a node slices the columns [start, end) = `columns` from the softmax, or from its gradient."""
    return _sliced_columns(row_read(node), column) == columns


def _sliced_columns(move: RowMove | None, column: SinkColumn) -> tuple[int, int] | None:
    """Return the start and end of the columns of the softmax that an operator slices or pads; None for other dimensions."""
    return None if move is None or move.is_single or move.rows.dim != column.dim else (move.rows.start, move.rows.stop)


def _is_backward(node: fx.Node, column: SinkColumn) -> bool:
    """Return whether a node is the backward of the column's softmax, and only slices of scores and column use its result.

    Its incoming gradient must be the gradient of the slice without the column: slice_backward(gradient of the probabilities).
    """
    softmax, ranges = column.softmax.meta[VALUE], (column.scores_range, column.column_range)
    match = BACKWARD.match(node, {"softmax": column.softmax, "dim": column.dim, "dtype": softmax.dtype})
    if match is None or node.meta[VALUE].dtype != softmax.dtype:
        return False
    padded: fx.Node = match["padded"]
    matches = (
        shape_of_node(padded) == shape_of_node(column.softmax)
        and _sliced_columns(row_write(padded), column) == column.scores_range
    )
    return matches and all(any(is_slice_of(user, column, columns) for columns in ranges) for user in node.users)


def incoming_gradient(backward: fx.Node) -> fx.Node:
    """Return the gradient of the probabilities, from which the backward of a column's softmax is computed."""
    return node_argument(node_argument(backward))


def _emit_without_column(match: SinkColumn, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Emit softmax(scores) times the scores' share of the sum; return {old node: new node} for slices and gradients.

    The shares are computed at least in float32, and results are cast back to the softmax's dtype.
    """
    softmax, dim = match.softmax, match.dim
    dtype = softmax.meta[VALUE].dtype
    scores, column = (
        emit_cast(writer, value, torch.promote_types(dtype, torch.float32)) for value in (match.scores, match.column)
    )
    share, column_share = _emit_shares(writer, scores, column, dim)
    probabilities = writer.call(aten.mul.Tensor, writer.call(aten._softmax.default, scores, dim, False), share)
    probabilities = writer.call(aten.masked_fill.Scalar, probabilities, writer.call(aten.eq.Scalar, share, 0), 0)
    result = emit_cast(writer, probabilities, dtype)
    replacements = {user: result for user in softmax.users if is_slice_of(user, match, match.scores_range)}
    for user in softmax.users:
        if user not in replacements:
            replacements |= _emit_gradients(match, user, writer.move_before(user), probabilities, column_share)
    return replacements


def _emit_shares(writer: GraphWriter, scores: fx.Node, column: fx.Node, dim: int) -> list[fx.Node]:
    """Emit two shares of the softmax's sum, each of size one along `dim`: of the scores and of the column.

    shares = softmax([logsumexp(scores - column), 0]). They are NaN if the full softmax is. The column, if it is finite, is
    subtracted from both: next to a score of -1e30, the logarithm of the number of scores would be lost to rounding.
    """
    column_value = column.meta[VALUE]
    zero = writer.call(aten.full.default, [], 0.0, dtype=column_value.dtype, device=column_value.device)
    offset = writer.call(aten.where.self, writer.call(aten.isinf.default, column), zero, column)
    scores_lse = writer.call(aten.logsumexp.default, writer.call(aten.sub.Tensor, scores, offset), [dim], True)
    both = writer.call(aten.cat.default, [scores_lse, writer.call(aten.sub.Tensor, column, offset)], dim)
    shares = writer.call(aten._softmax.default, both, dim, False)
    return [writer.rows(shares, dim, i, i + 1) for i in range(2)]


def _emit_gradients(
    match: SinkColumn, backward: fx.Node, writer: GraphWriter, probabilities: fx.Node, column_share: fx.Node
) -> dict[fx.Node, fx.Node]:
    """Emit the gradients of the scores and of the column; return {old slice of the backward's result: new gradient}.

    With probabilities p and their gradient g: p * (g - sum(g * p)) for the scores, -share * sum(g * p) for the column.
    """
    dtype = backward.meta[VALUE].dtype
    gradient = emit_cast(writer, incoming_gradient(backward), probabilities.meta[VALUE].dtype)
    row_sums = writer.call(aten.sum.dim_IntList, writer.call(aten.mul.Tensor, gradient, probabilities), [match.dim], True)
    scores_gradient = writer.call(aten.mul.Tensor, probabilities, writer.call(aten.sub.Tensor, gradient, row_sums))
    column_gradient = writer.call(aten.mul.Tensor, writer.call(aten.neg.default, column_share), row_sums)
    gradient_by_range = {
        match.scores_range: emit_cast(writer, scores_gradient, dtype),
        match.column_range: emit_cast(writer, column_gradient, dtype),
    }
    return {user: gradient_by_range[_sliced_columns(row_read(user), match)] for user in backward.users}  # type: ignore[index]


def emit_cast(writer: GraphWriter, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return a value in a dtype; emit a cast if necessary."""
    return value if value.meta[VALUE].dtype == dtype else writer.call(aten._to_copy.default, value, dtype=dtype)
