"""Vectorize a function of one score over all scores [b h m n].

Score and mask functions are graphs of 0-dimensional operators on a score and its four indices. Each value that depends on
these gets four leading dimensions, of size one if it does not vary along them: a value of query and key positions alone
is [1 1 m n].

    f(score, b, h, m, n) = score + slopes[h] * (n - m)   ->   scores + slopes[heads [1 h 1 1]] * (keys [1 1 1 n] - rows [1 1 m 1])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.registry import is_tagged_pointwise
from streamfx.torch_private import ZEROS_AND_SCATTER

aten = torch.ops.aten

GRID = 4
COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
FILLED: dict[Any, Any] = {
    aten.full_like.default: None,
    aten.new_full.default: None,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
}


class NotElementwiseError(Exception):
    """An operator in a score or mask function cannot be vectorized over all scores."""


@dataclass(frozen=True)
class ScoreValue:
    """A value for all scores: leading dimensions [b h m n], each full or of size one, then its own dimensions."""

    node: fx.Node


@dataclass(frozen=True)
class PartialLookup:
    """A tensor whose first dimensions have been indexed so far: `table[b]`, before `[q]`."""

    table: fx.Node
    indices: tuple[Any, ...]


Value: TypeAlias = Any  # ScoreValue, PartialLookup, a node or number that is the same for all scores, or None


def written_out(function: fx.GraphModule, arguments: list[Value], writer: GraphWriter) -> Any:
    """Return the results of `function` (a value, or a list of values) for all scores."""
    known: dict[fx.Node, Value] = dict(zip(function.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in function.graph.nodes:
        if node.op == "get_attr":
            known[node] = _constant(getattr(function, str(node.target)), writer)
        elif node.op == "call_function":
            known[node] = _vectorized(node, known, writer)
    results = function.graph.output_node().args[0]
    return fx.node.map_arg(results, lambda node: known[node])


def summed(value: Value, writer: GraphWriter) -> fx.Node:
    """Return the sum of a value over all scores."""
    if not isinstance(value, ScoreValue):
        return value  # type: ignore[no-any-return]
    return writer.call(aten.sum.dim_IntList, value.node, list(range(GRID)))


def _constant(tensor: torch.Tensor, writer: GraphWriter) -> fx.Node:
    if tensor.dim():
        raise NotElementwiseError("a constant tensor")
    return writer.call(aten.full.default, [], tensor.item(), dtype=tensor.dtype, device=tensor.device)


def _vectorized(node: fx.Node, known: dict[fx.Node, Value], writer: GraphWriter) -> Value:
    values = [known[source] for source in node.all_input_nodes]
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda source: known[source])
    args, kwargs = arguments
    target = node.target
    varies = any(isinstance(value, (ScoreValue, PartialLookup)) for value in values)
    if target is ZEROS_AND_SCATTER:
        shape, indices, value = args
        return _scattered(shape, indices, value, writer)
    if target in FILLED:
        return _filled(node, writer)
    if not varies:
        return writer.call(target, *args, **kwargs)
    if target is aten.index.Tensor:
        table, indices = args
        return _looked_up(table, indices, writer)
    if target in COPIES:
        return values[0]
    if not all(_is_number(value) for value in values) or not (is_tagged_pointwise(target) or target is aten._to_copy.default):
        raise NotElementwiseError(str(target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _plain(known[source]))
    return ScoreValue(writer.call(target, *args, **kwargs))


def _is_number(value: Value) -> bool:
    """Whether a value has no dimensions of its own."""
    rank = len(shape_of_node(value.node)) - GRID if isinstance(value, ScoreValue) else -1
    return rank == 0 or (isinstance(value, fx.Node) and not (is_tensor(value) and shape_of_node(value)))


def _plain(value: Value) -> Any:
    return value.node if isinstance(value, ScoreValue) else value


def _filled(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Return a constant, which is the same for all scores."""
    arguments, own = bound_arguments(node), node.meta[VALUE]
    fill = arguments["fill_value"] if FILLED[node.target] is None else FILLED[node.target]
    if own.dim() or isinstance(fill, fx.Node):
        raise NotElementwiseError(str(node.target))
    fill = bool(fill) if own.dtype == torch.bool else fill
    return writer.call(aten.full.default, [], fill, dtype=own.dtype, device=own.device)


def _looked_up(table: Value, indices: list[Value], writer: GraphWriter) -> Value:
    """Index a tensor: `table[b, q]`, or in steps, `table[b][q]`."""
    before: tuple[Any, ...] = ()
    if isinstance(table, PartialLookup):
        table, before = table.table, table.indices
    if isinstance(table, ScoreValue) or any(item is None or isinstance(item, PartialLookup) for item in indices):
        raise NotElementwiseError("aten.index.Tensor on parts of a tensor")
    found = (*before, *indices)
    if len(found) < len(shape_of_node(table)):
        return PartialLookup(table, found)
    return ScoreValue(writer.call(aten.index.Tensor, table, [_plain(item) for item in found]))


def _scattered(shape: list[int], indices: list[Value], value: Value, writer: GraphWriter) -> fx.Node:
    """Return the gradient of an index, summed over all scores. The sum over dimensions that no index depends on comes
    first.
    """
    nodes = [_plain(item) for item in indices]
    if not isinstance(value, ScoreValue) or len(nodes) != len(shape) or len(shape_of_node(value.node)) != GRID:
        raise NotElementwiseError("the gradient of a look-up of parts of a tensor")
    indexed_dims = {i for item in nodes for i, size in enumerate(shape_of_node(item)) if size != 1}
    dims = [dim for dim in range(GRID) if dim not in indexed_dims]
    gradient = writer.call(aten.sum.dim_IntList, value.node, dims, True) if dims else value.node
    own = gradient.meta[VALUE]
    zeros = writer.call(aten.full.default, list(shape), 0.0, dtype=own.dtype, device=own.device)
    return writer.call(aten.index_put.default, zeros, nodes, gradient, True)
