"""Vectorize a function of one score over all scores [b h m n].

Score and mask functions of `flex_attention` are graphs of 0-dimensional operators on a score and its four indices (batch,
head, query position, key position). Each value that depends on these gets four leading dimensions (`ScoreValue`), of size
one if it does not vary along them: a value of query and key positions alone is [1 1 m n]. Any other value is the same for
all scores and stays as it is.

    f(score, b, h, m, n) = score + slopes[h] * (n - m)   ->   scores + slopes[heads [1 h 1 1]] * (keys [1 1 1 n] - rows [1 1 m 1])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.operator_table import OPERATORS, Kind, is_kind
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.registry import is_tagged_pointwise
from streamfx.torch_private import ZEROS_AND_SCATTER

aten = torch.ops.aten

GRID_RANK = 4


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


def vectorize_graph(function: fx.GraphModule, arguments: list[Value], writer: GraphWriter) -> Any:
    """Emit a score or mask function for all scores at once; return its results: a value or a list of values.

    `arguments` are the vectorized values of the function's placeholders: a `ScoreValue` if they vary by score. Raise
    NotElementwiseError if an operator cannot be vectorized.
    """
    value_of: dict[fx.Node, Value] = dict(zip(function.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in function.graph.nodes:
        if node.op == "get_attr":
            value_of[node] = _emit_constant(getattr(function, str(node.target)), writer)
        elif node.op == "call_function":
            value_of[node] = _vectorize_node(node, value_of, writer)
    results = function.graph.output_node().args[0]
    return fx.node.map_arg(results, lambda node: value_of[node])


def sum_over_scores(value: Value, writer: GraphWriter) -> fx.Node:
    """Emit the sum of a value over all scores, its four leading dimensions; return any other value unchanged."""
    if not isinstance(value, ScoreValue):
        return value  # type: ignore[no-any-return]
    return writer.call(aten.sum.dim_IntList, value.node, list(range(GRID_RANK)))


def _emit_constant(tensor: torch.Tensor, writer: GraphWriter) -> fx.Node:
    """Emit a 0-dimensional tensor that a score function holds as a constant; raise NotElementwiseError for larger tensors."""
    if tensor.dim():
        raise NotElementwiseError("a constant tensor")
    return writer.call(aten.full.default, [], tensor.item(), dtype=tensor.dtype, device=tensor.device)


def _vectorize_node(node: fx.Node, value_of: dict[fx.Node, Value], writer: GraphWriter) -> Value:
    """Emit one operator of a score function for all scores, and return the vectorized value of its result.

    `value_of` has the vectorized values of its operands. Look-ups of tensors, constants and copies have separate rules; any
    other operator whose operands vary by score must be elementwise, else raise NotElementwiseError.
    """
    values = [value_of[source] for source in node.all_input_nodes]
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda source: value_of[source])
    args, kwargs = arguments
    target = node.target
    varies_by_score = any(isinstance(value, (ScoreValue, PartialLookup)) for value in values)
    if target is ZEROS_AND_SCATTER:
        shape, indices, value = args
        return _emit_lookup_gradient(shape, indices, value, writer)
    if not varies_by_score:
        return writer.call(target, *args, **kwargs)
    if is_kind(node, Kind.FILL):
        return _emit_constant_fill(node, writer)
    if target is aten.index.Tensor:
        table, indices = args
        return _emit_lookup(table, indices, writer)
    if is_kind(node, Kind.ALIAS, Kind.COPY):
        return values[0]
    if not all(_is_scalar_per_score(value) for value in values) or not (
        is_tagged_pointwise(target) or target is aten._to_copy.default
    ):
        raise NotElementwiseError(str(target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: unwrap(value_of[source]))
    return ScoreValue(writer.call(target, *args, **kwargs))


def _is_scalar_per_score(value: Value) -> bool:
    """Return whether a value is one number per score, or one number for all scores: neither is a vector or a look-up."""
    if isinstance(value, ScoreValue):
        return len(shape_of_node(value.node)) == GRID_RANK
    return isinstance(value, fx.Node) and not (is_tensor(value) and shape_of_node(value))


def unwrap(value: Value) -> Any:
    """Return the node of a value that varies by score; any other value unchanged."""
    return value.node if isinstance(value, ScoreValue) else value


def _emit_constant_fill(node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a 0-dimensional constant for `zeros_like`, `full_like` and similar operators of a score function.

    Raise NotElementwiseError if the fill value is computed, or if the traced result is not 0-dimensional.
    """
    arguments, traced = bound_arguments(node), node.meta[VALUE]
    fill = arguments.get("fill_value", OPERATORS[node.target].fill)
    if traced.dim() or isinstance(fill, fx.Node):
        raise NotElementwiseError(str(node.target))
    fill = bool(fill) if traced.dtype == torch.bool else fill
    return writer.call(aten.full.default, [], fill, dtype=traced.dtype, device=traced.device)


def _emit_lookup(table: Value, indices: list[Value], writer: GraphWriter) -> Value:
    """Emit `table[indices]` for all scores; some index varies by score.

    For `table[b][q]`, the look-up `table[b]` emits nothing and returns a `PartialLookup` of the table with the index b. The
    look-up with the last index emits `table[b, q]`.
    """
    earlier_indices: tuple[Any, ...] = ()
    if isinstance(table, PartialLookup):
        table, earlier_indices = table.table, table.indices
    if isinstance(table, ScoreValue) or any(item is None or isinstance(item, PartialLookup) for item in indices):
        raise NotElementwiseError("aten.index.Tensor on parts of a tensor")
    all_indices = (*earlier_indices, *indices)
    if len(all_indices) < len(shape_of_node(table)):
        return PartialLookup(table, all_indices)
    return ScoreValue(writer.call(aten.index.Tensor, table, [unwrap(item) for item in all_indices]))


def _emit_lookup_gradient(shape: list[int], indices: list[Value], value: Value, writer: GraphWriter) -> fx.Node:
    """Emit the gradient of a look-up `table[indices]`: zeros of the table's shape, with each score's gradient added.

    `value` is the gradient per score. It is first summed over the dimensions of scores on which no index depends: for
    `table[h]`, over batch and positions.
    """
    index_nodes = [unwrap(index) for index in indices]
    if not isinstance(value, ScoreValue) or len(index_nodes) != len(shape) or len(shape_of_node(value.node)) != GRID_RANK:
        raise NotElementwiseError("the gradient of a look-up of parts of a tensor")
    indexed_dims = {dim for index in index_nodes for dim, size in enumerate(shape_of_node(index)) if size != 1}
    summed_dims = [dim for dim in range(GRID_RANK) if dim not in indexed_dims]
    gradient = writer.call(aten.sum.dim_IntList, value.node, summed_dims, True) if summed_dims else value.node
    gradient_value = gradient.meta[VALUE]
    zeros = writer.call(aten.full.default, list(shape), 0.0, dtype=gradient_value.dtype, device=gradient_value.device)
    return writer.call(aten.index_put.default, zeros, index_nodes, gradient, True)
