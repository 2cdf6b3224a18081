"""Simplify concatenations with known rows: empty tensors, constants, and single rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, has_same_type, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


@dataclass(frozen=True)
class _Concat:
    """The non-empty operands of a concatenation, and the dimension along which they are concatenated."""

    operands: list[fx.Node]
    dim: int
    rank: int
    is_float: bool  # all operands have the floating-point dtype of the result

    @property
    def is_pair(self) -> bool:
        """Return whether there are exactly two computed operands, concatenated along a dimension other than the last."""
        computed = [piece for piece in self.operands if find_fill(piece) is None]
        return self.is_float and len(computed) == len(self.operands) == 2 and self.dim < self.rank - 1


def _match_concat(node: fx.Node) -> _Concat:
    """Return the non-empty operands and the dimension of a `cat` node."""
    all_operands: Any = node.args[0]
    nonempty = [item for item in all_operands if 0 not in shape_of_node(item)]
    rank, dtype = len(shape_of_node(node)), node.meta[VALUE].dtype
    is_float = all(piece.meta[VALUE].dtype == dtype and dtype.is_floating_point for piece in nonempty)
    return _Concat(nonempty, bound_arguments(node)["dim"] % rank if rank else 0, rank, is_float)


@rewrite_rule(aten.cat.default)
def remove_cat_with_empty(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([empty, x]) -> clone(x)

    Keys are concatenated with an empty cache in this way.
    """
    operands = _match_concat(node).operands
    is_copy = len(operands) == 1 and operands[0].meta[VALUE].dtype == node.meta[VALUE].dtype
    return writer.call(aten.clone.default, operands[0]) if is_copy else None


@rewrite_rule(aten.cat.default)
def cat_with_constant_to_pad(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([zeros, x]) -> pad(x, before)"""
    concat = _match_concat(node)
    fills = [find_fill(piece) for piece in concat.operands]
    computed = [i for i, fill in enumerate(fills) if fill is None]
    values = {(fill, math.copysign(1.0, fill)) for fill in fills if fill is not None}
    if len(computed) != 1 or len(values) != 1 or not concat.is_float:
        return None
    (i,) = computed
    sides = concat.operands[:i], concat.operands[i + 1 :]
    before, after = (sum(piece.meta[VALUE].shape[concat.dim] for piece in side) for side in sides)
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    pad = [0, 0] * (concat.rank - 1 - concat.dim) + [before, after]
    return writer.call(aten.constant_pad_nd.default, concat.operands[i], pad, values.pop()[0])


@rewrite_rule(aten.cat.default)
def token_shift_to_where(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([row, x[:-1]]) -> where(arange == 0, row padded to index 0, pad(x[:-1], before))

    If one row comes before or after the others, both operands are padded and `where` selects one of them.
    """
    concat = _match_concat(node)
    lengths = [shape_of_node(piece)[concat.dim] for piece in concat.operands] if concat.is_pair else []
    if [length == 1 for length in lengths].count(True) != 1 or not all(isinstance(length, int) for length in lengths):
        return None
    i, pad_of_inner_dims = lengths.index(1), [0, 0] * (concat.rank - 1 - concat.dim)
    row, rest = concat.operands[i], concat.operands[1 - i]
    if not _is_slice(rest, concat.dim):
        return None
    shape, row_index = list(node.meta[VALUE].shape), 0 if i == 0 else lengths[0]
    rest = writer.call(aten.constant_pad_nd.default, rest, [*pad_of_inner_dims, *((1, 0) if i == 0 else (0, 1))], 0.0)
    row = writer.call(aten.slice_backward.default, row, shape, concat.dim, row_index, row_index + 1, 1)
    indices = writer.call(aten.arange.default, sum(lengths), device=node.meta[VALUE].device)
    column_of_indices = writer.call(aten.view.default, indices, [-1] + [1] * (concat.rank - 1 - concat.dim))
    return writer.call(aten.where.self, writer.call(aten.eq.Scalar, column_of_indices, row_index), row, rest)


def _is_slice(piece: fx.Node, dim: int) -> bool:
    """Return whether a value is a slice along a dimension."""
    return piece.target is aten.slice.Tensor and bound_arguments(piece)["dim"] % len(shape_of_node(piece)) == dim


@rewrite_rule(aten.slice_scatter.default)
def slice_scatter_to_pad(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """slice_scatter(zeros, x, 0, 1, 3) -> pad(x, before and after)"""
    arguments, rows = bound_arguments(node), node_argument(node, 1)
    value, dim = find_fill(node.args[0]), arguments["dim"] % len(shape_of_node(node))
    length, row_count = (item.meta[VALUE].shape[dim] for item in (node, rows))
    start = arguments["start"] or 0
    after = length - row_count - start if isinstance(start, int) and start >= 0 else None
    if value is None or arguments["step"] != 1 or not isinstance(after, int) or after < 0:
        return None
    other_sizes, other_row_sizes = ([*shape[:dim], *shape[dim + 1 :]] for shape in (shape_of_node(node), shape_of_node(rows)))
    if other_sizes != other_row_sizes or not has_same_type(rows, node) or not node.meta[VALUE].is_floating_point():
        return None
    pad = [0, 0] * (len(shape_of_node(node)) - 1 - dim) + [start, after]
    return writer.call(aten.constant_pad_nd.default, rows, pad, value)
