"""Restore the order of permuted rows by a scatter with the permutation, instead of a gather with its inverse.

    p = sort(keys).indices     gather(x, d, inverse of p)               ->    scatter(zeros, d, p, x)
                               scatter_add(zeros, d, inverse of p, g)   ->    gather(g, d, p) + 0
                               scatter_add(zeros, d, p, g)              ->    scatter(zeros, d, p, g + 0)

A gather with the inverse needs all rows first; a scatter only needs the rows of one chunk. The indices of a sort (an
*order*) name each row once, so each element is written once. The inverse of p is written as argsort(p), or as
scatter(..., p, arange). (`sort_elimination.py` removes permutations on which no result depends.) In shapes, `[... n]`
has the rows as its last dimension, and `[... n *width]` any number of columns after them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE, WRITES_EACH_ONCE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import REST, either, op, rewrite_rule
from streamfx.passes.rewrite.views.iota_index import index_before_expand, is_arange

aten = torch.ops.aten

SORT_OPTIONS = {"dim": "dim", "descending": "descending"}
SORT_INDICES = either(
    op(of_kind(Kind.ARGSORT), "keys", REST, **SORT_OPTIONS),
    op(operator.getitem, op(of_kind(Kind.SORT), "keys", REST, **SORT_OPTIONS), 1),
)
WRITE = op(aten.scatter.src, ..., "dim", "index", "values")


@rewrite_rule(aten.gather.default)
def gather_by_inverse_to_scatter(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """gather(x, d, inverse of an order) -> scatter(zeros, d, order, x)

    An order is the indices of a sort along dimension d, so each element is written once.
    """
    arguments = bound_arguments(node)
    rows = arguments["self"]
    order = _match_inverted_permutation(arguments["index"], arguments["dim"])
    if order is None or shape_of_node(rows) != shape_of_node(node):
        return None
    value = node.meta[VALUE]
    zeros = writer.call(aten.full.default, size_arguments(rows, writer), 0, dtype=value.dtype, device=value.device)
    return _emit_scatter(zeros, arguments["dim"], _expand_to_columns(order, rows, writer), rows, writer)


@rewrite_rule(aten.scatter_add.default)
def scatter_add_by_inverse_to_gather(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """scatter_add(zeros, d, inverse of an order, g) -> gather(g, d, order) + 0

    The addition matters because 0 + -0 is 0.
    """
    arguments = bound_arguments(node)
    rows, order = arguments["src"], _match_inverted_permutation(arguments["index"], arguments["dim"])
    if order is None or not _is_added_to_zeros(node):
        return None
    gathered = writer.call(aten.gather.default, rows, arguments["dim"], _expand_to_columns(order, rows, writer))
    return writer.call(aten.add.Tensor, gathered, 0.0)


@rewrite_rule(aten.scatter_add.default)
def scatter_add_by_order_to_scatter(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """scatter_add(zeros, d, order, g) -> scatter(zeros, d, order, g + 0)"""
    arguments = bound_arguments(node)
    order, dim = index_before_expand(arguments["index"]), arguments["dim"] % max(len(shape_of_node(node)), 1)
    if order is None or not _is_permutation(order, dim) or not _is_added_to_zeros(node):
        return None
    rows = writer.call(aten.add.Tensor, arguments["src"], 0.0)
    return _emit_scatter(arguments["self"], arguments["dim"], arguments["index"], rows, writer)


def _is_added_to_zeros(node: fx.Node) -> bool:
    """Return whether a `scatter_add` adds floating-point values to zeros of the same shape."""
    arguments = bound_arguments(node)
    covers_all = shape_of_node(arguments["src"]) == shape_of_node(arguments["index"]) == shape_of_node(node)
    return covers_all and is_zero(arguments["self"]) and node.meta[VALUE].is_floating_point()


def _emit_scatter(zeros: fx.Node, dim: int, index: fx.Node, rows: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a scatter of rows into zeros, marked in its metadata (`WRITES_EACH_ONCE`): no element is written twice."""
    result = writer.call(aten.scatter.src, zeros, dim, index, rows)
    result.meta[WRITES_EACH_ONCE] = True
    return result


def _match_inverted_permutation(index: fx.Node, dim: int) -> fx.Node | None:
    """Return p if `index` is the inverse of the sort indices p along `dim`; else None.

    The inverse is scatter(..., p, arange) or argsort(p). An index [... n *width] must repeat it for all columns.
    """
    rank = len(shape_of_node(index))
    vector = index_before_expand(index)
    dim = dim % rank if rank else 0
    if vector is None or dim >= len(shape_of_node(vector)):
        return None
    if (write := WRITE.match(vector, {"dim": dim})) is not None:
        permutation, values = write["index"], write["values"]
        covers_all = shape_of_node(permutation) == shape_of_node(values) == shape_of_node(vector)
        return permutation if covers_all and _is_permutation(permutation, dim) and _is_arange_along(values, dim) else None
    argsort = SORT_INDICES.match(vector, {"dim": dim, "descending": False})
    return argsort["keys"] if argsort is not None and _is_permutation(argsort["keys"], dim) else None


def _is_permutation(node: fx.Node, dim: int) -> bool:
    """Return whether each index occurs once along `dim`: the node is the indices of a sort, ascending or descending."""
    return bool(shape_of_node(node)) and SORT_INDICES.match(node, {"dim": dim}) is not None


def _is_arange_along(node: fx.Node, dim: int) -> bool:
    """Return whether a tensor is 0, 1, 2, ... along `dim`, and the same along all others: a vector that is expanded."""
    shape = shape_of_node(node)
    node = node_argument(node) if node.target is aten.expand.default else node
    shape_before_expand = shape_of_node(node)
    padded_shape = (*(1 for _ in shape[len(shape_before_expand) :]), *shape_before_expand)
    if any(size != (shape[dim] if i == dim else 1) for i, size in enumerate(padded_shape)):
        return False
    while is_kind(node, Kind.UNSQUEEZE, Kind.RESHAPE):
        node = node_argument(node)
    return is_arange(node)


def _expand_to_columns(order: fx.Node, rows: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a permutation [... n] expanded to the shape of the rows, [... n *width]: the same index for all columns."""
    for _ in shape_of_node(rows)[len(shape_of_node(order)) :]:
        order = writer.call(aten.unsqueeze.default, order, -1)
    return writer.call(aten.expand.default, order, size_arguments(rows, writer))
