"""Replace an index that takes one element per row, or one token per sequence, by a comparison and a sum.

A model head on the last token is such an index. An index needs all rows at once, while a sum accumulates over chunks. A sum
turns -0 into 0, so the sign is summed separately. An assertion checks that the indices are in range, as the index operator
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, shape_of_node
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.constant_indices import enumerate_rows
from streamfx.passes.rewrite.views.iota_index import INDEX_DTYPES, VIEWS, find_repeats

aten = torch.ops.aten
SCALAR_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class _OneHotIndex:
    """`x[arange(b)[:, None], arange(t), numbers]`: all index tensors except `numbers` enumerate the rows of their dimension.

    If `is_viewed`, the others enumerate the rows of a view of x, which has the shape of `numbers`, followed by the indexed
    dimension. `dim` is then a dimension of the view.
    """

    source: fx.Node
    numbers: fx.Node
    dim: int
    indexed_dim: int  # the dimension of the source that `numbers` indexes
    rows: int  # the number of enumerated dimensions of the view
    is_viewed: bool

    @property
    def rank(self) -> int:
        """Return the rank of the values that are looked up or written."""
        trailing = len(shape_of_node(self.source)) - self.indexed_dim - 1
        return self.rows + trailing if self.is_viewed else len(shape_of_node(self.source)) - 1

    def view(self, value: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value of the source's shape as the view whose rows are enumerated."""
        if not self.is_viewed:
            return value
        sizes = [*size_arguments(self.numbers, writer), *size_arguments(self.source, writer)[self.indexed_dim :]]
        return writer.call(aten.reshape.default, value, sizes)

    def unview(self, value: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value of the view's shape with the source's shape."""
        return writer.call(aten.reshape.default, value, size_arguments(self.source, writer)) if self.is_viewed else value


@rewrite_rule(aten.index.Tensor)
def index_per_row_to_masked_sum(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[arange(b), last] -> where(arange(t) == last[:, None], x, 0).sum(1)

    Also if a view has flattened the rows: x[arange(b * t).view(b, t), last] is then an index into x.view(b, t, v).
    """
    index = _match_index(node)
    if index is None or not node.meta[VALUE].is_floating_point() or any(_is_written_back(user, index) for user in node.users):
        return None
    source, mask = index.view(index.source, writer), _emit_mask(index, writer)
    signs = writer.call(aten.copysign.Tensor, _emit_scalar(1.0, source, writer), source)
    magnitude, sign = (_emit_masked_sum(mask, values, index.dim, writer) for values in (source, signs))
    return writer.call(aten.copysign.Tensor, magnitude, sign)


def _emit_masked_sum(mask: fx.Node, values: fx.Node, dim: int, writer: GraphWriter) -> fx.Node:
    """Emit the sum along `dim` of the values at which `mask` is true."""
    return writer.call(aten.sum.dim_IntList, writer.call(aten.where.self, mask, values, _emit_scalar(0.0, values, writer)), [dim])


@rewrite_rule(aten.index_put.default)
def index_put_per_row_to_where(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_put(x, [arange(b), last], d) -> where(arange(t) == last[:, None], d[:, None], x)

    Each index names a different element, so nothing is added twice; if `accumulate` is set, the selected value is x + d.
    A value computed from the look-up x[arange(b), last], as in x[arange(b), last] -= 1, is computed from x instead. The
    gradient of a look-up is written into zeros.
    """
    arguments, index = bound_arguments(node), _match_index(node)
    target, values, dtype = arguments["self"], arguments["values"], node.meta[VALUE].dtype
    if index is None or values.meta[VALUE].dtype != dtype or len(shape_of_node(values)) > index.rank:
        return None
    if arguments["accumulate"] and not dtype.is_floating_point:
        return None
    if not arguments["accumulate"] and _is_computed_from_lookup(values, index):
        new_values = writer.call(values.target, index.view(target, writer), *values.args[1:], **values.kwargs)
    elif not is_zero(target):
        new_values = _broadcast_to_mask(values, index, writer)
        new_values = (
            writer.call(aten.add.Tensor, index.view(target, writer), new_values) if arguments["accumulate"] else new_values
        )
    else:  # 0 + -0 is 0
        new_values = (
            writer.call(aten.add.Tensor, values, _emit_scalar(0.0, target, writer)) if arguments["accumulate"] else values
        )
        selected = writer.call(
            aten.where.self,
            _emit_mask(index, writer),
            _broadcast_to_mask(new_values, index, writer),
            _emit_scalar(0.0, target, writer),
        )
        return index.unview(selected, writer)
    return index.unview(writer.call(aten.where.self, _emit_mask(index, writer), new_values, index.view(target, writer)), writer)


def _broadcast_to_mask(values: fx.Node, index: _OneHotIndex, writer: GraphWriter) -> fx.Node:
    """Broadcast one value per row to all elements that the row's index may select."""
    for _ in range(index.rank - len(shape_of_node(values))):
        values = writer.call(aten.unsqueeze.default, values, 0)
    return writer.call(aten.unsqueeze.default, values, index.dim)


def _is_written_back(values: fx.Node, index: _OneHotIndex) -> bool:
    """Return whether a value computed from a look-up is written to the index that it was read from."""
    return _is_computed_from_lookup(values, index) and any(
        user.target is aten.index_put.default and node_argument(user) is index.source and _match_index(user) == index
        for user in values.users
    )


def _is_computed_from_lookup(values: fx.Node, index: _OneHotIndex) -> bool:
    """Return whether values are computed elementwise, with a number, from the elements that they overwrite."""
    if values.target not in SCALAR_ARITHMETIC or not is_tensor(values.args[0]) or not isinstance(values.args[1], (int, float)):
        return False
    look_up = node_argument(values)
    return look_up.target is aten.index.Tensor and _match_index(look_up) == index


def _match_index(node: fx.Node) -> _OneHotIndex | None:
    """Match an index of two or more tensors of which all but one enumerate rows; None for any other index."""
    arguments = bound_arguments(node)
    source, indices = arguments["self"], arguments["indices"]
    shape, count = shape_of_node(source), len(indices)
    if count < 2 or not all(is_tensor(index) and index.meta[VALUE].dtype in INDEX_DTYPES for index in indices):
        return None
    enumerated = [_match_enumerated_dim(index, shape[dim], count - 1) for dim, index in enumerate(indices)]
    dim = next((i for i, enumerated_dim in enumerate(enumerated) if enumerated_dim != i), count)
    if dim == count or enumerated[dim + 1 :] != list(range(dim, count - 1)):
        return _match_index_of_view(source, indices)
    if shape_of_node(indices[dim]) != (*shape[:dim], *shape[dim + 1 : count]):
        return _match_index_of_view(source, indices)
    return _OneHotIndex(source, indices[dim], dim, dim, count - 1, is_viewed=False)


def _match_index_of_view(source: fx.Node, indices: Sequence[fx.Node]) -> _OneHotIndex | None:
    """Match an index whose last tensor is free, while the others together enumerate the rows of all dimensions before it."""
    *counts, numbers = indices
    shape, indexed_dim = shape_of_node(numbers), len(counts)
    if not enumerate_rows(counts, shape_of_node(source)[:indexed_dim], shape):
        return None
    return _OneHotIndex(source, numbers, len(shape), indexed_dim, len(shape), is_viewed=True)


def _match_enumerated_dim(index: fx.Node, rows: Size, rank: int) -> int | None:
    """Return the dimension (of `rank`) along which an index enumerates all rows, if it is constant along all others."""
    broadcast_shape = shape_of_node(index)
    while index.target in (aten.unsqueeze.default, aten.expand.default, *VIEWS):
        operand_shape = shape_of_node(node_argument(index))
        if index.target is aten.expand.default:
            broadcast_shape = (
                (1,) * (len(broadcast_shape) - len(operand_shape)) + operand_shape
                if broadcast_shape == shape_of_node(index)
                else ()
            )
        index = node_argument(index)
    wide_dims = [dim for dim, size in enumerate(broadcast_shape) if size != 1]
    is_vector = (
        len(shape_of_node(index)) == 1 and len(wide_dims) == 1 and broadcast_shape[wide_dims[0]] == shape_of_node(index)[0]
    )
    return wide_dims[0] + rank - len(broadcast_shape) if is_vector and find_repeats(index, rows) == 1 else None


def _emit_checked_indices(index: _OneHotIndex, writer: GraphWriter) -> fx.Node:
    """Emit the indices with negative ones wrapped, and an assertion that all are in range; return the wrapped indices."""
    numbers, size = index.numbers, size_arguments(index.source, writer)[index.indexed_dim]
    is_from_end, from_start = writer.call(aten.lt.Scalar, numbers, 0), writer.call(aten.add.Tensor, numbers, size)
    wrapped = writer.call(aten.where.self, is_from_end, from_start, numbers)
    bounds = writer.call(aten.ge.Scalar, wrapped, 0), writer.call(aten.lt.Scalar, wrapped, size)
    all_inside = writer.call(aten.all.default, writer.call(aten.bitwise_and.Tensor, *bounds))
    writer.call(aten._assert_async.msg, all_inside, f"index out of bounds for dimension {index.indexed_dim}")
    return wrapped


def _emit_mask(index: _OneHotIndex, writer: GraphWriter) -> fx.Node:
    """Emit the mask [b t 1 ...] of the elements that the index selects."""
    wrapped, size = _emit_checked_indices(index, writer), size_arguments(index.source, writer)[index.indexed_dim]
    indices = writer.call(aten.arange.default, size, device=wrapped.meta[VALUE].device)
    for _ in range(index.dim):
        indices = writer.call(aten.unsqueeze.default, indices, 0)
    indices = _append_dims(indices, index.dim + 1, index.rows + 1, writer)
    mask = writer.call(aten.eq.Tensor, indices, writer.call(aten.unsqueeze.default, wrapped, index.dim))
    return _append_dims(mask, index.rows + 1, index.rank + 1, writer)


def _append_dims(node: fx.Node, rank: int, target_rank: int, writer: GraphWriter) -> fx.Node:
    """Append dimensions of size one from `rank` to `target_rank`."""
    for dim in range(rank, target_rank):
        node = writer.call(aten.unsqueeze.default, node, dim)
    return node


def _emit_scalar(number: float, like: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a 0-dimensional constant with the dtype and device of another value."""
    value = like.meta[VALUE]
    return writer.call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
