"""One element of each row of a matrix, or one token of each sequence (heads on the last token): taken by comparing positions.

A look-up by number needs all rows at once; this sum takes what a chunk of them has. It makes 0 of -0, so that the sign is looked
up, too. That numbers are in range is asserted, as the look-up does itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.passes.canonicalization.equation import equation
from streamfx.passes.canonicalization.row_numbers import repeats
from streamfx.passes.operators.fillers import is_zero

aten = torch.ops.aten


@equation(aten.index.Tensor)
def one_of_each(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[arange(b), last] -> where(arange(t) == last[:, None], x, 0).sum(1)"""
    arguments = bound_arguments(node)
    source, numbers = arguments["self"], _numbers(arguments)
    if numbers is None:
        return None
    hit = _hit(_in_range(numbers, source, writer), source, writer)
    signs = writer.call(aten.copysign.Tensor, _number(1.0, source, writer), source)
    taken, sign = (_sum_of_hits(hit, values, writer) for values in (source, signs))
    return writer.call(aten.copysign.Tensor, taken, sign)


def _sum_of_hits(hit: fx.Node, values: fx.Node, writer: GraphWriter) -> fx.Node:
    return writer.call(aten.sum.dim_IntList, writer.call(aten.where.self, hit, values, _number(0.0, values, writer)), [1])


@equation(aten.index_put.default)
def put_into_each(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_put(zeros, [arange(b), last], d) -> where(arange(t) == last[:, None], d[:, None], 0)

    The gradient of the look-up.
    """
    arguments = bound_arguments(node)
    target, values, numbers = arguments["self"], arguments["values"], _numbers(arguments)
    if numbers is None or not is_zero(target) or shape_of_node(values) != shape_of_node(node)[:1] + shape_of_node(node)[2:]:
        return None
    hit = _hit(_in_range(numbers, target, writer), target, writer)
    if arguments["accumulate"]:  # zero plus -0 is zero
        values = writer.call(aten.add.Tensor, values, _number(0.0, target, writer))
    return writer.call(aten.where.self, hit, writer.call(aten.unsqueeze.default, values, 1), _number(0.0, target, writer))


def _numbers(arguments: dict[str, Any]) -> fx.Node | None:
    """The second of two indices, where the first counts all rows."""
    source, indices = arguments["self"], arguments["indices"]
    shape = shape_of_node(source)
    if len(indices) != 2 or not all(is_tensor(index) for index in indices) or not source.meta["val"].is_floating_point():
        return None
    first, second = indices
    if any(len(shape_of_node(index)) != 1 or index.meta["val"].dtype != torch.int64 for index in indices):
        return None
    if shape_of_node(first) != shape[:1] or shape_of_node(second) != shape[:1] or repeats(first, shape[0]) != 1:
        return None
    return second


def _in_range(numbers: fx.Node, source: fx.Node, writer: GraphWriter) -> fx.Node:
    """Numbers counted from the start, all of which are there."""
    size = size_arguments(source, writer)[1]
    is_from_end, from_start = writer.call(aten.lt.Scalar, numbers, 0), writer.call(aten.add.Tensor, numbers, size)
    counted = writer.call(aten.where.self, is_from_end, from_start, numbers)
    inside = writer.call(aten.ge.Scalar, counted, 0), writer.call(aten.lt.Scalar, counted, size)
    is_there = writer.call(aten.all.default, writer.call(aten.bitwise_and.Tensor, *inside))
    writer.call(aten._assert_async.msg, is_there, "index out of bounds for dimension 1")
    return counted


def _hit(numbers: fx.Node, source: fx.Node, writer: GraphWriter) -> fx.Node:
    """[b t 1 ...]: whether a row's number is the one that is asked for."""
    rank = len(shape_of_node(source))
    position = writer.call(aten.arange.default, size_arguments(source, writer)[1], device=numbers.meta["val"].device)
    wide = writer.call(aten.unsqueeze.default, position, 0), writer.call(aten.unsqueeze.default, numbers, 1)
    return _unsqueezed(writer.call(aten.eq.Tensor, *wide), 2, rank, writer)


def _unsqueezed(node: fx.Node, rank: int, wanted: int, writer: GraphWriter) -> fx.Node:
    for dim in range(rank, wanted):
        node = writer.call(aten.unsqueeze.default, node, dim)
    return node


def _number(value: float, like: fx.Node, writer: GraphWriter) -> fx.Node:
    own = like.meta["val"]
    return writer.call(aten.full.default, [], value, dtype=own.dtype, device=own.device)
