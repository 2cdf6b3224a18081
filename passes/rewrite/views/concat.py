"""Simplify concatenations with known rows: empty tensors, constants, and single rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_alike, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import fill_of
from streamfx.passes.rewrite.pattern import equation

aten = torch.ops.aten


@dataclass(frozen=True)
class _Join:
    """The non-empty operands of a concatenation, and the dimension along which they are concatenated."""

    pieces: list[fx.Node]
    dim: int
    rank: int
    is_float: bool  # all operands have the floating-point dtype of the result

    @property
    def is_pair(self) -> bool:
        """Whether there are exactly two computed operands, concatenated along a dimension other than the last."""
        computed = [piece for piece in self.pieces if fill_of(piece) is None]
        return self.is_float and len(computed) == len(self.pieces) == 2 and self.dim < self.rank - 1


def _join(node: fx.Node) -> _Join:
    operands: Any = node.args[0]
    pieces = [item for item in operands if 0 not in shape_of_node(item)]
    rank, own = len(shape_of_node(node)), node.meta[VALUE].dtype
    is_float = all(piece.meta[VALUE].dtype == own and own.is_floating_point for piece in pieces)
    return _Join(pieces, bound_arguments(node)["dim"] % rank if rank else 0, rank, is_float)


@equation(aten.cat.default)
def join_with_nothing(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([empty, x]) -> clone(x)

    Keys are concatenated with an empty cache in this way.
    """
    pieces = _join(node).pieces
    is_copy = len(pieces) == 1 and pieces[0].meta[VALUE].dtype == node.meta[VALUE].dtype
    return writer.call(aten.clone.default, pieces[0]) if is_copy else None


@equation(aten.cat.default)
def join_with_constants(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([zeros, x]) -> pad(x, before)"""
    join = _join(node)
    fills = [fill_of(piece) for piece in join.pieces]
    computed = [i for i, fill in enumerate(fills) if fill is None]
    values = {(fill, math.copysign(1.0, fill)) for fill in fills if fill is not None}
    if len(computed) != 1 or len(values) != 1 or not join.is_float:
        return None
    (i,) = computed
    sides = join.pieces[:i], join.pieces[i + 1 :]
    before, after = (sum(piece.meta[VALUE].shape[join.dim] for piece in side) for side in sides)
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    pad = [0, 0] * (join.rank - 1 - join.dim) + [before, after]
    return writer.call(aten.constant_pad_nd.default, join.pieces[i], pad, values.pop()[0])


@equation(aten.cat.default)
def token_shift(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """cat([row, x[:-1]]) -> where(arange == 0, row padded to index 0, pad(x[:-1], before))

    If one row comes before or after the others, both operands are padded and `where` selects one of them.
    """
    join = _join(node)
    lengths = [shape_of_node(piece)[join.dim] for piece in join.pieces] if join.is_pair else []
    if [length == 1 for length in lengths].count(True) != 1 or not all(isinstance(length, int) for length in lengths):
        return None
    i, others = lengths.index(1), [0, 0] * (join.rank - 1 - join.dim)
    row, rest = join.pieces[i], join.pieces[1 - i]
    if not _is_slice(rest, join.dim):
        return None
    shape, at = list(node.meta[VALUE].shape), 0 if i == 0 else lengths[0]
    rest = writer.call(aten.constant_pad_nd.default, rest, [*others, *((1, 0) if i == 0 else (0, 1))], 0.0)
    row = writer.call(aten.slice_backward.default, row, shape, join.dim, at, at + 1, 1)
    numbers = writer.call(aten.arange.default, sum(lengths), device=node.meta[VALUE].device)
    wide = writer.call(aten.view.default, numbers, [-1] + [1] * (join.rank - 1 - join.dim))
    return writer.call(aten.where.self, writer.call(aten.eq.Scalar, wide, at), row, rest)


def _is_slice(piece: fx.Node, dim: int) -> bool:
    return piece.target is aten.slice.Tensor and bound_arguments(piece)["dim"] % len(shape_of_node(piece)) == dim


@equation(aten.slice_scatter.default)
def rows_written_into_a_constant(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """slice_scatter(zeros, x, 0, 1, 3) -> pad(x, before and after)"""
    arguments, rows = bound_arguments(node), node_argument(node, 1)
    value, dim = fill_of(node.args[0]), arguments["dim"] % len(shape_of_node(node))
    length, written = (item.meta[VALUE].shape[dim] for item in (node, rows))
    start = arguments["start"] or 0
    after = length - written - start if isinstance(start, int) and start >= 0 else None
    if value is None or arguments["step"] != 1 or not isinstance(after, int) or after < 0:
        return None
    across, own = ([*shape[:dim], *shape[dim + 1 :]] for shape in (shape_of_node(node), shape_of_node(rows)))
    if across != own or not is_alike(rows, node) or not node.meta[VALUE].is_floating_point():
        return None
    pad = [0, 0] * (len(shape_of_node(node)) - 1 - dim) + [start, after]
    return writer.call(aten.constant_pad_nd.default, rows, pad, value)
