"""Replace a masked scatter of rows (images among tokens) by a look-up, and a masked write of a scalar by `where`.

A masked scatter writes the rows of `source` to the masked rows of x, in order. So masked row i gets row cumsum(mask)[i] - 1
of the source. With this look-up, a chunk of rows needs only the cumulative sum so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from streamfx.ir.joint import has_same_type, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import REST, Through, either, op, rewrite_rule, tensor

aten = torch.ops.aten

EXPANDED = Through({aten.clone.default}, op(aten.expand.default, "row_mask", REST, name="expanded"))
# one cast, which is the one to bool: an earlier cast may turn 0.5 into 0
EXPANDED_ROW_MASK = either(EXPANDED, Through({aten.clone.default}, op(aten._to_copy.default, EXPANDED, REST)))


@rewrite_rule(op(aten.masked_scatter.default, "x", "mask", "source"))
def masked_scatter_to_where(node: fx.Node, writer: GraphWriter, x: fx.Node, mask: fx.Node, source: fx.Node) -> fx.Node | None:
    """masked_scatter(x, mask, source) -> where(mask, source[cumsum(mask) - 1], x)

    Applies to static shapes and masks that select complete rows. The source must not be empty, because rows that are not
    masked look up row 0.
    """
    row_mask = _match_row_mask(mask)
    width = shape_of_node(node)[-1] if shape_of_node(node) else 0
    has_shape_of_rows = shape_of_node(mask) == shape_of_node(node) and shape_of_node(source)[-1:] == (width,)
    if row_mask is None or not has_shape_of_rows or not _are_static(node, source) or not _is_nonempty(source):
        return None
    row_indices = _emit_row_indices(row_mask, writer)
    flat = writer.call(aten.reshape.default, source, [-1, width])
    return writer.call(aten.where.self, mask, writer.call(aten.index.Tensor, flat, [row_indices]), x)


@rewrite_rule(op(aten.index_put.default, "x", [tensor("mask")], "scalar"))
def index_put_by_mask_to_where(node: fx.Node, writer: GraphWriter, x: fx.Node, mask: fx.Node, scalar: fx.Node) -> fx.Node | None:
    """index_put(x, [mask], scalar) -> where(mask, scalar, x)

    All masked elements get the same value, so their order does not matter.
    """
    shape, rows = shape_of_node(x), shape_of_node(mask)
    if mask.meta[VALUE].dtype != torch.bool or not rows or shape[: len(rows)] != rows:
        return None
    if shape_of_node(scalar) or not has_same_type(scalar, x):
        return None
    for dim in range(len(rows), len(shape)):
        mask = writer.call(aten.unsqueeze.default, mask, dim)
    return writer.call(aten.where.self, mask, scalar, x)


@rewrite_rule(op(aten.masked_scatter_backward.default, "gradient", "mask", "sizes"))
def masked_scatter_backward_to_index_put(
    node: fx.Node, writer: GraphWriter, gradient: fx.Node, mask: fx.Node, sizes: Sequence[int]
) -> fx.Node | None:
    """masked_scatter_backward(d, mask) -> zeros, with the masked rows of d added at cumsum(mask) - 1

    Rows that are not masked add zero.
    """
    row_mask, value = _match_row_mask(mask), node.meta[VALUE]
    width = shape_of_node(gradient)[-1] if shape_of_node(gradient) else 0
    has_shape_of_rows = shape_of_node(mask) == shape_of_node(gradient) and shape_of_node(node)[-1:] == (width,)
    if row_mask is None or not has_shape_of_rows or not _are_static(node, gradient) or not _is_nonempty(node):
        return None
    keywords = {"dtype": value.dtype, "device": value.device}
    zero = writer.call(aten.full.default, [], 0.0, **keywords)
    masked = writer.call(aten.where.self, mask, gradient, zero)
    zeros = writer.call(aten.full.default, [math.prod(value.shape[:-1]), width], 0.0, **keywords)
    added = writer.call(aten.index_put.default, zeros, [_emit_row_indices(row_mask, writer)], masked, True)
    return writer.call(aten.reshape.default, added, list(sizes))


def _match_row_mask(mask: fx.Node) -> fx.Node | None:
    """Return the mask of rows [... 1] if `mask` is bool and repeats it along the last dimension; else None.

    expand(row_mask, [..., width]) -> row_mask. The result may have another dtype, if a cast to bool follows the expansion.
    """
    match = EXPANDED_ROW_MASK.match(mask)
    if match is None or mask.meta[VALUE].dtype != torch.bool:
        return None
    shape, expanded_shape = shape_of_node(match["row_mask"]), shape_of_node(match["expanded"])
    is_mask_of_rows = len(shape) == len(expanded_shape) and shape[-1] == 1 and shape[:-1] == expanded_shape[:-1]
    return match["row_mask"] if is_mask_of_rows else None


def _emit_row_indices(row_mask: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit cumsum(row_mask) - 1, at least 0: the index of each masked row among all masked rows, in the shape [...].

    A mask 0 1 0 1 yields 0 0 0 1. Other rows get the index of the last masked row before them, or 0.
    """
    shape = list(shape_of_node(row_mask))[:-1]
    if row_mask.meta[VALUE].dtype != torch.bool:
        row_mask = writer.call(aten._to_copy.default, row_mask, dtype=torch.bool)
    flat = writer.call(aten._to_copy.default, writer.call(aten.reshape.default, row_mask, [-1]), dtype=torch.int64)
    indices = writer.call(aten.clamp.default, writer.call(aten.sub.Tensor, writer.call(aten.cumsum.default, flat, 0), 1), 0)
    return writer.call(aten.reshape.default, indices, shape)


def _is_nonempty(node: fx.Node) -> bool:
    """Return whether a value has elements."""
    return 0 not in shape_of_node(node)


def _are_static(*nodes: fx.Node) -> bool:
    """Return whether the shapes of all nodes are static."""
    return all(isinstance(size, int) for node in nodes for size in shape_of_node(node))
