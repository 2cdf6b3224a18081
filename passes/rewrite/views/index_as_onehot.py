"""Replace an index that takes one element per row, or one token per sequence, by a comparison and a sum.

    x[arange(b), last]   ->   where(arange(t) == last[:, None], x, 0).sum(1)          x is [b t v], last is [b]

A model head on the last token is such an index. An index needs all rows at once, while a sum accumulates over chunks. A sum
turns -0 into 0, so the sign is summed separately. An assertion checks that the indices are in range, as the index operator
does. All index tensors but one enumerate the rows of their dimension (arange); the other one, `numbers` (here: last), has
one index for each of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, shape_of_node
from streamfx.ir.operator_table import ARITHMETIC, Kind, is_kind
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import rewrite_rule
from streamfx.passes.rewrite.views.constant_indices import enumerate_rows
from streamfx.passes.rewrite.views.iota_index import INDEX_DTYPES, find_repeats

aten = torch.ops.aten


@dataclass(frozen=True)
class _OneHotIndex:
    """`x[arange(b)[:, None], arange(t), numbers]`: all index tensors except `numbers` enumerate the rows of their dimension.

    If `is_viewed`, the others enumerate the rows of a view of x, which has the shape of `numbers`, followed by the indexed
    dimension. `dim` is then a dimension of the view.
    """

    source: fx.Node
    numbers: fx.Node
    dim: int  # the dimension that `numbers` indexes, of the source or of the view
    indexed_dim: int  # the dimension of the source that `numbers` indexes
    num_row_dims: int  # the number of enumerated dimensions
    is_viewed: bool

    @property
    def rank(self) -> int:
        """The rank of the values that are looked up or written: the rank of the source, or of its view, minus one."""
        trailing_dims = len(shape_of_node(self.source)) - self.indexed_dim - 1
        return self.num_row_dims + trailing_dims if self.is_viewed else len(shape_of_node(self.source)) - 1

    def emit_view(self, value: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value of the source's shape in the shape of the view whose rows are enumerated: [(b t) v] -> [b t v].

        Emit nothing if the source itself is indexed.
        """
        if not self.is_viewed:
            return value
        sizes = [*size_arguments(self.numbers, writer), *size_arguments(self.source, writer)[self.indexed_dim :]]
        return writer.call(aten.reshape.default, value, sizes)

    def emit_unview(self, value: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value of the view's shape in the source's shape: [b t v] -> [(b t) v]. This is the inverse of `view`."""
        return writer.call(aten.reshape.default, value, size_arguments(self.source, writer)) if self.is_viewed else value


@rewrite_rule(aten.index.Tensor)
def index_per_row_to_masked_sum(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[arange(b), last] -> where(arange(t) == last[:, None], x, 0).sum(1)

    Also if a view has flattened the rows: x[arange(b * t).view(b, t), last] is then an index into x.view(b, t, v).
    """
    index = _match_index(node)
    if index is None or not node.meta[VALUE].is_floating_point() or any(_is_written_back(user, index) for user in node.users):
        return None
    source, mask = index.emit_view(index.source, writer), _emit_mask(index, writer)
    signs = writer.call(aten.copysign.Tensor, _emit_scalar(1.0, source, writer), source)
    magnitude, sign = (_emit_masked_sum(mask, values, index.dim, writer) for values in (source, signs))
    return writer.call(aten.copysign.Tensor, magnitude, sign)


@rewrite_rule(aten.diagonal.default)
def diagonal_to_masked_sum(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """diagonal(x [n n]) -> where(arange(n)[:, None] == arange(n), x, 0).sum(1)

    A diagonal has rows and columns in one dimension; a sum keeps the rows. Applies to square matrices. -0 becomes 0.
    """
    arguments, source = bound_arguments(node), node_argument(node)
    rank = len(shape_of_node(source))
    row_dim, column_dim = (arguments[name] % rank for name in ("dim1", "dim2"))
    value = source.meta[VALUE]
    if arguments["offset"] or value.shape[row_dim] != value.shape[column_dim] or not value.is_floating_point():
        return None
    place = writer.call(aten.arange.default, size_arguments(source, writer)[row_dim], device=value.device)
    rows, columns = (_emit_appended_dims(place, 1, rank - dim, writer) for dim in (row_dim, column_dim))
    diagonal = _emit_masked_sum(writer.call(aten.eq.Tensor, rows, columns), source, column_dim, writer)
    order = [dim for dim in range(rank - 1) if dim != row_dim - (row_dim > column_dim)]
    return writer.call(aten.permute.default, diagonal, [*order, row_dim - (row_dim > column_dim)])


def _emit_masked_sum(mask: fx.Node, values: fx.Node, dim: int, writer: GraphWriter) -> fx.Node:
    """Emit where(mask, values, 0).sum(dim)."""
    masked = writer.call(aten.where.self, mask, values, _emit_scalar(0.0, values, writer))
    return writer.call(aten.sum.dim_IntList, masked, [dim])


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
    if not arguments["accumulate"] and _is_computed_from_lookup(values, index):  # x[index] = f(x[index])
        new_values = writer.call(values.target, index.emit_view(target, writer), *values.args[1:], **values.kwargs)
    elif not is_zero(target):
        new_values = _broadcast_to_mask(values, index, writer)
        if arguments["accumulate"]:
            new_values = writer.call(aten.add.Tensor, index.emit_view(target, writer), new_values)
    else:  # x is zeros: the gradient of a look-up
        new_values = values
        if arguments["accumulate"]:  # 0 + -0 is 0
            new_values = writer.call(aten.add.Tensor, values, _emit_scalar(0.0, target, writer))
        selected = writer.call(
            aten.where.self,
            _emit_mask(index, writer),
            _broadcast_to_mask(new_values, index, writer),
            _emit_scalar(0.0, target, writer),
        )
        return index.emit_unview(selected, writer)
    written = writer.call(aten.where.self, _emit_mask(index, writer), new_values, index.emit_view(target, writer))
    return index.emit_unview(written, writer)


def _broadcast_to_mask(values: fx.Node, index: _OneHotIndex, writer: GraphWriter) -> fx.Node:
    """Emit the written values, one per row, with a dimension of size one for the indexed dimension, so that they broadcast.

    For x [b t v] and an index over t: values [b v] -> [b 1 v]. Missing leading dimensions are added first.
    """
    for _ in range(index.rank - len(shape_of_node(values))):
        values = writer.call(aten.unsqueeze.default, values, 0)
    return writer.call(aten.unsqueeze.default, values, index.dim)


def _is_written_back(values: fx.Node, index: _OneHotIndex) -> bool:
    """Return whether values computed from a look-up are written back where they were read, as in x[arange(b), last] -= 1."""
    return _is_computed_from_lookup(values, index) and any(
        user.target is aten.index_put.default and node_argument(user) is index.source and _match_index(user) == index
        for user in values.users
    )


def _is_computed_from_lookup(values: fx.Node, index: _OneHotIndex) -> bool:
    """Return whether values are x[index] + number (or -, *, /), where x[index] are the elements that `index` selects."""
    if values.target not in ARITHMETIC or not is_tensor(values.args[0]) or not isinstance(values.args[1], (int, float)):
        return False
    look_up = node_argument(values)
    return look_up.target is aten.index.Tensor and _match_index(look_up) == index


def _match_index(node: fx.Node) -> _OneHotIndex | None:
    """Match an `index` or `index_put` by several tensors, all but one of which enumerate rows; None for any other index.

    In x[arange(b)[:, None], numbers, arange(v)], tensor 0 enumerates dimension 0 of the selected values [b v], and tensor 2
    their dimension 1. `numbers` [b v] indexes dimension 1 of x.
    """
    arguments = bound_arguments(node)
    source, indices = arguments["self"], arguments["indices"]
    shape, num_indices = shape_of_node(source), len(indices)
    if num_indices < 2 or not all(is_tensor(index) and index.meta[VALUE].dtype in INDEX_DTYPES for index in indices):
        return None
    enumerated_dims = [_match_enumerated_dim(index, shape[dim], num_indices - 1) for dim, index in enumerate(indices)]
    # the tensors before `numbers` enumerate the dimensions 0, 1, ..., the tensors after it the next ones
    dim = next((i for i, enumerated_dim in enumerate(enumerated_dims) if enumerated_dim != i), num_indices)
    if dim == num_indices or enumerated_dims[dim + 1 :] != list(range(dim, num_indices - 1)):
        return _match_index_of_view(source, indices)
    if shape_of_node(indices[dim]) != (*shape[:dim], *shape[dim + 1 : num_indices]):
        return _match_index_of_view(source, indices)
    return _OneHotIndex(source, indices[dim], dim, indexed_dim=dim, num_row_dims=num_indices - 1, is_viewed=False)


def _match_index_of_view(source: fx.Node, indices: Sequence[fx.Node]) -> _OneHotIndex | None:
    """Match an index whose last tensor is `numbers`, and whose others together enumerate the rows of all dimensions before it.

    x [(b t) v] by arange(b * t).view(b, t) and numbers [b t] is an index of the view [b t v]. Return None if nothing matches.
    """
    *row_indices, numbers = indices
    shape, indexed_dim = shape_of_node(numbers), len(row_indices)
    if not enumerate_rows(row_indices, shape_of_node(source)[:indexed_dim], shape):
        return None
    return _OneHotIndex(source, numbers, dim=len(shape), indexed_dim=indexed_dim, num_row_dims=len(shape), is_viewed=True)


def _match_enumerated_dim(index: fx.Node, rows: Size, rank: int) -> int | None:
    """Return the dimension along which an index tensor is 0, 1, ..., `rows` - 1, if it is the same along all others; else None.

    The dimension is a dimension of the tensor broadcast to `rank` dimensions: for arange(3)[:, None] and rank 3, return 1.
    """
    broadcast_shape = shape_of_node(index)
    while is_kind(index, Kind.UNSQUEEZE, Kind.EXPAND, Kind.RESHAPE):
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
    """Emit `numbers`, with the size added to negative ones, and an assertion that all are in range; return the indices."""
    numbers, size = index.numbers, size_arguments(index.source, writer)[index.indexed_dim]
    is_negative = writer.call(aten.lt.Scalar, numbers, 0)
    from_end = writer.call(aten.add.Tensor, numbers, size)
    wrapped = writer.call(aten.where.self, is_negative, from_end, numbers)
    is_inside = writer.call(aten.ge.Scalar, wrapped, 0), writer.call(aten.lt.Scalar, wrapped, size)
    all_inside = writer.call(aten.all.default, writer.call(aten.bitwise_and.Tensor, *is_inside))
    writer.call(aten._assert_async.msg, all_inside, f"index out of bounds for dimension {index.indexed_dim}")
    return wrapped


def _emit_mask(index: _OneHotIndex, writer: GraphWriter) -> fx.Node:
    """Emit the mask of the elements that the index selects: arange(t) == numbers[:, None], in the shape [b t 1 ...].

    It has the rank of the source, or of its view. An assertion checks that the indices are in range.
    """
    numbers, size = _emit_checked_indices(index, writer), size_arguments(index.source, writer)[index.indexed_dim]
    positions = writer.call(aten.arange.default, size, device=numbers.meta[VALUE].device)
    for _ in range(index.dim):
        positions = writer.call(aten.unsqueeze.default, positions, 0)
    positions = _emit_appended_dims(positions, index.dim + 1, index.num_row_dims + 1, writer)
    mask = writer.call(aten.eq.Tensor, positions, writer.call(aten.unsqueeze.default, numbers, index.dim))
    return _emit_appended_dims(mask, index.num_row_dims + 1, index.rank + 1, writer)


def _emit_appended_dims(node: fx.Node, rank: int, target_rank: int, writer: GraphWriter) -> fx.Node:
    """Emit a value of this rank with dimensions of size one appended, so that it has `target_rank` dimensions."""
    for dim in range(rank, target_rank):
        node = writer.call(aten.unsqueeze.default, node, dim)
    return node


def _emit_scalar(number: float, like: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a 0-dimensional constant with the dtype and device of another value."""
    value = like.meta[VALUE]
    return writer.call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
