"""Rewrite a softmax over keys and one extra column that is dropped afterwards (an attention sink) without that column.

Scores with an extra column do not have an axis of keys alone. But a softmax over two slices is the softmax of each slice,
times this slice's share of the sum, and the shares are a softmax of two numbers:

    softmax(cat([s, k]))[..., :-1] = softmax(s) * w,   w, u = softmax([logsumexp(s - k), 0])

If a row sees no key, all its scores are minus infinity and w is zero. The result must then be zero, as with the column;
softmax(s) times zero would be NaN. The backward is rewritten, too: with p = softmax(s) * w and its gradient g, the
gradient of the scores is p * (g - sum(g * p)), and the gradient of the column is -u * sum(g * p). u is computed
separately, because 1 - w loses its digits if the column's share is small. Nothing is rewritten unless all uses match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import equation

aten = torch.ops.aten


@dataclass(frozen=True)
class SinkColumn:
    """Scores and one extra column; `first` is the index of the first score in their concatenation."""

    softmax: fx.Node
    scores: fx.Node
    column: fx.Node
    dim: int
    first: int

    @property
    def scores_range(self) -> tuple[int, int]:
        count = shape_of_node(self.scores)[self.dim]
        assert isinstance(count, int)
        return self.first, self.first + count

    @property
    def column_range(self) -> tuple[int, int]:
        end = self.scores_range[1]
        return (end, end + 1) if self.first == 0 else (0, 1)


@equation(aten._softmax.default)
def softmax_without_a_column(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """softmax(cat([s, k]))[..., :-1] -> softmax(s) * w,  w, u = softmax([logsumexp(s - k), 0])"""
    found = column_of(node)
    return _without_column(found, writer) if found is not None and fits(found) else None


def column_of(softmax: fx.Node) -> SinkColumn | None:
    """Return the scores and the extra column of a softmax, or None."""
    given = bound_arguments(softmax)
    joined = given["self"]
    if not isinstance(joined, fx.Node) or joined.target is not aten.cat.default or given["half_to_float"]:
        return None
    arguments, rank = bound_arguments(joined), len(shape_of_node(softmax))
    pieces: list[fx.Node] = list(arguments["tensors"])
    along = int(arguments["dim"]) % rank
    if len(pieces) != 2 or any(len(shape_of_node(piece)) != rank for piece in pieces) or given["dim"] % rank != along:
        return None
    counts = [shape_of_node(piece)[along] for piece in pieces]
    if not all(isinstance(count, int) for count in counts) or (counts[0] == 1) == (counts[1] == 1):
        return None
    at = 0 if counts[1] == 1 else 1
    return SinkColumn(softmax, pieces[at], pieces[1 - at], along, at)


def fits(found: SinkColumn) -> bool:
    """Whether all uses of a softmax drop the column, and its backward separates the column's gradient from the scores'."""
    return all(is_part(user, found, found.scores_range) or _is_backward(user, found) for user in found.softmax.users)


def is_part(node: fx.Node, found: SinkColumn, part: tuple[int, int]) -> bool:
    """Whether a value is a slice of the columns of a softmax, or of its gradient."""
    return node.target is aten.slice.Tensor and _bounds(node, found) == part


def _bounds(node: fx.Node, found: SinkColumn) -> tuple[int, int] | None:
    """Return the start and end of a slice, or of a slice's gradient, along the keys; None if it is not of this form."""
    arguments, rank = bound_arguments(node), len(shape_of_node(found.softmax))
    length = found.column_range[1] if found.first == 0 else found.scores_range[1]
    start, end = arguments["start"] or 0, arguments["end"]
    if arguments["dim"] % rank != found.dim or arguments["step"] != 1 or not isinstance(start, int):
        return None
    end = length if end is None else end
    if not isinstance(end, int):
        return None
    return start + length * (start < 0), min(end + length * (end < 0), length)


def _is_backward(node: fx.Node, found: SinkColumn) -> bool:
    """Whether a node is the backward for a gradient of the scores' slice, and is only used by slices of scores or column."""
    if node.target is not aten._softmax_backward_data.default:
        return False
    arguments, softmax = bound_arguments(node), found.softmax.meta[VALUE]
    gradient = arguments["grad_output"]
    is_of_this = arguments["output"] is found.softmax and arguments["dim"] % softmax.dim() == found.dim
    if not is_of_this or arguments["input_dtype"] != softmax.dtype or node.meta[VALUE].dtype != softmax.dtype:
        return False
    if not isinstance(gradient, fx.Node) or gradient.target is not aten.slice_backward.default:
        return False
    parts = (found.scores_range, found.column_range)
    fits = shape_of_node(gradient) == shape_of_node(found.softmax) and _bounds(gradient, found) == found.scores_range
    return fits and all(any(is_part(user, found, part) for part in parts) for user in node.users)


def _without_column(found: SinkColumn, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    softmax, dim = found.softmax, found.dim
    dtype = softmax.meta[VALUE].dtype
    scores, column = (
        converted(writer, value, torch.promote_types(dtype, torch.float32)) for value in (found.scores, found.column)
    )
    share, rest = _shares(writer, scores, column, dim)
    kept = writer.call(aten.mul.Tensor, writer.call(aten._softmax.default, scores, dim, False), share)
    kept = writer.call(aten.masked_fill.Scalar, kept, writer.call(aten.eq.Scalar, share, 0), 0)
    result = converted(writer, kept, dtype)
    equals = {user: result for user in softmax.users if user.target is aten.slice.Tensor}
    for user in softmax.users:
        if user not in equals:
            equals |= _gradients(found, user, writer.before(user), kept, rest)
    return equals


def _shares(writer: GraphWriter, scores: fx.Node, column: fx.Node, dim: int) -> list[fx.Node]:
    """Return the shares of the scores and of the column in the sum; NaN if the full softmax is NaN.

    The column, if it is finite, is subtracted from both: relative to a score of -1e30, the number of scores would be lost
    to rounding.
    """
    own = column.meta[VALUE]
    zero = writer.call(aten.full.default, [], 0.0, dtype=own.dtype, device=own.device)
    less = writer.call(aten.where.self, writer.call(aten.isinf.default, column), zero, column)
    total = writer.call(aten.logsumexp.default, writer.call(aten.sub.Tensor, scores, less), [dim], True)
    both = writer.call(aten.cat.default, [total, writer.call(aten.sub.Tensor, column, less)], dim)
    shares = writer.call(aten._softmax.default, both, dim, False)
    return [writer.call(aten.slice.Tensor, shares, dim, i, i + 1) for i in range(2)]


def _gradients(found: SinkColumn, backward: fx.Node, writer: GraphWriter, kept: fx.Node, rest: fx.Node) -> dict[fx.Node, fx.Node]:
    gradient = bound_arguments(bound_arguments(backward)["grad_output"])["grad_output"]
    dtype = backward.meta[VALUE].dtype
    gradient = converted(writer, gradient, kept.meta[VALUE].dtype)
    total = writer.call(aten.sum.dim_IntList, writer.call(aten.mul.Tensor, gradient, kept), [found.dim], True)
    of_scores = writer.call(aten.mul.Tensor, kept, writer.call(aten.sub.Tensor, gradient, total))
    of_column = writer.call(aten.mul.Tensor, writer.call(aten.neg.default, rest), total)
    results = {found.scores_range: converted(writer, of_scores, dtype), found.column_range: converted(writer, of_column, dtype)}
    return {user: results[_bounds(user, found)] for user in backward.users}  # type: ignore[index]


def converted(writer: GraphWriter, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return value if value.meta[VALUE].dtype == dtype else writer.call(aten._to_copy.default, value, dtype=dtype)
