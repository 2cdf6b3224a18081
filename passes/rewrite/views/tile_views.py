"""Replace a slice that is one block of a tensor by an index into the view that holds all blocks.

    x.view(n, k), x[2 * k : 3 * k]                    ->    x.view(n, k), x.view(n, k)[2]
    d.view(n * k) + slice_backward(g, 2 * k, 3 * k)   ->    d.view(n * k) + select_backward(g, 2).view(n * k)

A block is one of n equal slices of k rows each. Loops over blocks slice them; operators on all blocks have a dimension of
blocks. With a dimension of blocks in both cases, the analysis does not mistake rows within a block for rows of the
sequence. Blocks that such a loop writes, and their gradients, are rewritten in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from streamfx.ir.joint import node_argument, shape_of_node, tensor_operands
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter
from streamfx.passes.ops.row_maps import RowMove, is_same_type_addition, is_static_shape, nested_addends, row_read, row_write
from streamfx.passes.ops.rules.registry import broadcast, rule_for
from streamfx.passes.ops.traits import is_random
from streamfx.passes.rewrite.pattern import rewrite_rule

aten = torch.ops.aten


class RowBlock(NamedTuple):
    """One of several blocks of `size` rows along dimension `dim`: rows [block_index * size, (block_index + 1) * size)."""

    dim: int
    block_index: int
    size: int


@rewrite_rule(*of_kind(Kind.SLICE))
def slice_to_select_of_view(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[2 * k : 3 * k] -> x.view(n, k)[2]

    Applies if a view of x has the same blocks.
    """
    source = node_argument(node)
    block = _match_block(row_read(node))
    if block is None:
        return None
    dim, block_index, size = block
    blocks = _shape_with_blocks(shape_of_node(source), dim, size)
    if not any(is_kind(user, Kind.RESHAPE) and shape_of_node(user) == blocks for user in source.users):
        return None
    return writer.call(aten.select.int, writer.call(aten.view.default, source, list(blocks)), dim, block_index)


@rewrite_rule(aten.slice_backward.default)
def slice_backward_to_select_backward(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """slice_backward(g, 2 * k, 3 * k) -> select_backward(g, 2).view(n * k)

    Applies if the gradient is added to a view that flattens blocks of this size.
    """
    shape = shape_of_node(node)
    block = _match_block(row_write(node))
    if block is None:
        return None
    dim, block_index, size = block
    blocks = _shape_with_blocks(shape, dim, size)
    flattened = (addend for addend in nested_addends(_largest_sum_with(node)) if is_kind(addend, Kind.RESHAPE))
    if not any(shape_of_node(node_argument(addend)) == blocks for addend in flattened):
        return None
    padded = writer.call(aten.select_backward.default, node.args[0], list(blocks), dim, block_index)
    return writer.call(aten.view.default, padded, list(shape))


@rewrite_rule(aten.add.Tensor)
def add_of_views_to_view_of_add(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x.view(n * k) + select_backward(g, 2).view(n * k) -> (x + select_backward(g, 2)).view(n * k)

    Also if x, or the gradient, is itself such a sum.
    """
    views = node.all_input_nodes
    if len(views) != 2 or not is_same_type_addition(node) or not all(is_kind(view, Kind.RESHAPE) for view in views):
        return None
    left, right = (node_argument(view) for view in views)  # with a dimension of blocks
    has_select_backward = any(_is_select_backward(value) for operand in (left, right) for value in (operand, *_addends(operand)))
    if not has_select_backward or shape_of_node(left) != shape_of_node(right) or not is_static_shape(shape_of_node(node)):
        return None
    return writer.call(aten.view.default, writer.call(aten.add.Tensor, left, right), list(shape_of_node(node)))


@rewrite_rule(*of_kind(Kind.SLICE))
def slice_of_view_to_select(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x.view(n * k)[2 * k : 3 * k] -> x[2]

    Applies if x has the blocks in a separate dimension.
    """
    source = node_argument(node)
    block = _match_block(row_read(node))
    if block is None or not is_kind(source, Kind.RESHAPE):
        return None
    dim, block_index, size = block
    x = node_argument(source)
    has_blocks = shape_of_node(x) == _shape_with_blocks(shape_of_node(source), dim, size)
    return writer.call(aten.select.int, x, dim, block_index) if has_blocks else None


def _is_select_backward(node: fx.Node) -> bool:
    """Return whether a node is a `select_backward`: the gradient of one block, padded with zeros for all other blocks."""
    return node.target is aten.select_backward.default


def _addends(node: fx.Node) -> list[fx.Node]:
    """Return the operands of an addition; the empty list for any other operator."""
    return node.all_input_nodes if node.target is aten.add.Tensor else []


def _match_block(move: RowMove | None) -> RowBlock | None:
    """Return the block of a tensor that an operator reads, or that is not padding in the gradient of such a read.

    Return None unless its rows are one of two or more equal blocks of at least two rows, and the shape is static.
    """
    if move is None or not move.rows.is_static or not is_static_shape(shape := shape_of_node(move.tensor)):
        return None
    dim, start, end = move.rows
    size = end - start
    is_block = 1 < size < shape[dim] and start % size == 0 and shape[dim] % size == 0  # type: ignore[operator]
    return RowBlock(dim, start // size, size) if is_block else None


def _shape_with_blocks(shape: tuple[Size, ...], dim: int, size: int) -> tuple[Size, ...]:
    """Return the shape with dimension `dim` split into blocks of `size` rows: (6, 4) -> (2, 3, 4) for dim 0 and size 3."""
    return (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])  # type: ignore[operator]


def _largest_sum_with(node: fx.Node) -> fx.Node:
    """Return the sum that a value ends in: follow additions from `node` as long as each value has one user.

    For (node + a) + b, return the second addition; return the node itself if its only user is not an addition.
    """
    while len(node.users) == 1 and (user := next(iter(node.users))).target is aten.add.Tensor:
        node = user
    return node


@rewrite_rule(*of_kind(Kind.RESHAPE))
def view_of_flat_arithmetic_to_arithmetic(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """f(x.view(m * n), y.view(m * n)).view(m, n) -> f(x, y), if x and y have m rows and n columns

    Applies to any number of elementwise operators. Queries and keys in one dimension have no rows.
    """
    shape, flat_shape = shape_of_node(node), shape_of_node(node_argument(node))
    unflattened, operators, todo = {}, set(), [node_argument(node)]
    while todo and len(flat_shape) == 1 < len(shape):
        value = todo.pop()
        is_flattened = is_kind(value, Kind.RESHAPE) and shape_of_node(node_argument(value)) == shape
        if is_flattened or not shape_of_node(value):
            unflattened[value] = node_argument(value) if is_flattened else value
        elif (
            value.op == "call_function"
            and shape_of_node(value) == flat_shape
            and rule_for(value) is broadcast
            and not is_random(value)
        ):
            todo.extend(operand for operand in tensor_operands(value) if operand not in operators)
            operators.add(value)
        else:
            return None
    for value in sorted(operators):
        args, kwargs = fx.node.map_arg((value.args, value.kwargs), lambda operand: unflattened.get(operand, operand))
        unflattened[value] = writer.call(value.target, *args, **kwargs)
    return unflattened[node_argument(node)] if operators else None
