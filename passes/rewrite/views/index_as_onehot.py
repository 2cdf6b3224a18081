"""Replace an index that takes one element per row, or one token per sequence, by a comparison and a sum.

A model head on the last token is such an index. An index needs all rows at once; the sum adds up the contributions of
chunks. A sum turns -0 into 0, so the sign is looked up separately. An assertion checks that the indices are in range, as
the index operator itself does.
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
from streamfx.passes.rewrite.pattern import equation
from streamfx.passes.rewrite.views.constant_indices import are_row_numbers
from streamfx.passes.rewrite.views.iota_index import NUMBERS, VIEWS, repeats

aten = torch.ops.aten
OF_NUMBERS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class _Numbers:
    """`x[arange(b)[:, None], arange(t), numbers]`: all index tensors but one enumerate the rows of their dimension.

    Alternatively the others enumerate the rows of a view of x: the view has the shape of `numbers`, followed by the
    indexed dimension. `dim` is then a dimension of the view.
    """

    source: fx.Node
    numbers: fx.Node
    dim: int
    place: int  # the dimension of the source that `numbers` indexes
    rows: int  # the number of enumerated dimensions of the view
    is_viewed: bool

    @property
    def rank(self) -> int:
        """The rank of the values that are looked up or written."""
        trailing = len(shape_of_node(self.source)) - self.place - 1
        return self.rows + trailing if self.is_viewed else len(shape_of_node(self.source)) - 1

    def view(self, value: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value of the source's shape as the view whose rows are enumerated."""
        if not self.is_viewed:
            return value
        sizes = [*size_arguments(self.numbers, writer), *size_arguments(self.source, writer)[self.place :]]
        return writer.call(aten.reshape.default, value, sizes)

    def back(self, value: fx.Node, writer: GraphWriter) -> fx.Node:
        """Return a value of the view's shape with the source's shape."""
        return writer.call(aten.reshape.default, value, size_arguments(self.source, writer)) if self.is_viewed else value


@equation(aten.index.Tensor)
def one_of_each(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """x[arange(b), last] -> where(arange(t) == last[:, None], x, 0).sum(1)

    Also if a view has flattened the rows: x[arange(b * t).view(b, t), last] is then taken from x.view(b, t, v).
    """
    found = _numbers(node)
    if found is None or not node.meta[VALUE].is_floating_point() or any(_is_changed_in_place(user, found) for user in node.users):
        return None
    source, hit = found.view(found.source, writer), _hit(found, writer)
    signs = writer.call(aten.copysign.Tensor, _number(1.0, source, writer), source)
    taken, sign = (_sum_of_hits(hit, values, found.dim, writer) for values in (source, signs))
    return writer.call(aten.copysign.Tensor, taken, sign)


def _sum_of_hits(hit: fx.Node, values: fx.Node, dim: int, writer: GraphWriter) -> fx.Node:
    return writer.call(aten.sum.dim_IntList, writer.call(aten.where.self, hit, values, _number(0.0, values, writer)), [dim])


@equation(aten.index_put.default)
def put_into_each(node: fx.Node, writer: GraphWriter) -> fx.Node | None:
    """index_put(x, [arange(b), last], d) -> where(arange(t) == last[:, None], d[:, None], x)

    Each index names a different element, so nothing is added twice; if `accumulate` is set, the selected value is x + d.
    A value computed from the look-up x[arange(b), last], as in x[arange(b), last] -= 1, is computed from x instead. The
    gradient of a look-up is written into zeros.
    """
    arguments, found = bound_arguments(node), _numbers(node)
    target, values, dtype = arguments["self"], arguments["values"], node.meta[VALUE].dtype
    if found is None or values.meta[VALUE].dtype != dtype or len(shape_of_node(values)) > found.rank:
        return None
    if arguments["accumulate"] and not dtype.is_floating_point:
        return None
    if not arguments["accumulate"] and _is_of(values, found):
        new_values = writer.call(values.target, found.view(target, writer), *values.args[1:], **values.kwargs)
    elif not is_zero(target):
        new_values = _spread(values, found, writer)
        new_values = (
            writer.call(aten.add.Tensor, found.view(target, writer), new_values) if arguments["accumulate"] else new_values
        )
    else:  # 0 + -0 is 0
        new_values = writer.call(aten.add.Tensor, values, _number(0.0, target, writer)) if arguments["accumulate"] else values
        put = writer.call(aten.where.self, _hit(found, writer), _spread(new_values, found, writer), _number(0.0, target, writer))
        return found.back(put, writer)
    return found.back(writer.call(aten.where.self, _hit(found, writer), new_values, found.view(target, writer)), writer)


def _spread(values: fx.Node, found: _Numbers, writer: GraphWriter) -> fx.Node:
    """Broadcast one value per row to all elements that the row's index may select."""
    for _ in range(found.rank - len(shape_of_node(values))):
        values = writer.call(aten.unsqueeze.default, values, 0)
    return writer.call(aten.unsqueeze.default, values, found.dim)


def _is_changed_in_place(values: fx.Node, found: _Numbers) -> bool:
    """Whether a value computed from a look-up is written to the index that it was read from."""
    return _is_of(values, found) and any(
        user.target is aten.index_put.default and node_argument(user) is found.source and _numbers(user) == found
        for user in values.users
    )


def _is_of(values: fx.Node, found: _Numbers) -> bool:
    """Whether values are computed elementwise, with a number, from the elements that they overwrite."""
    if values.target not in OF_NUMBERS or not is_tensor(values.args[0]) or not isinstance(values.args[1], (int, float)):
        return False
    look_up = node_argument(values)
    return look_up.target is aten.index.Tensor and _numbers(look_up) == found


def _numbers(node: fx.Node) -> _Numbers | None:
    arguments = bound_arguments(node)
    source, indices = arguments["self"], arguments["indices"]
    shape, count = shape_of_node(source), len(indices)
    if count < 2 or not all(is_tensor(index) and index.meta[VALUE].dtype in NUMBERS for index in indices):
        return None
    counted = [_counts(index, shape[dim], count - 1) for dim, index in enumerate(indices)]
    dim = next((i for i, place in enumerate(counted) if place != i), count)
    if dim == count or counted[dim + 1 :] != list(range(dim, count - 1)):
        return _numbers_of_a_view(source, indices)
    if shape_of_node(indices[dim]) != (*shape[:dim], *shape[dim + 1 : count]):
        return _numbers_of_a_view(source, indices)
    return _Numbers(source, indices[dim], dim, dim, count - 1, is_viewed=False)


def _numbers_of_a_view(source: fx.Node, indices: Sequence[fx.Node]) -> _Numbers | None:
    """Return the last index if the other indices together enumerate the rows of all dimensions before it."""
    *counts, numbers = indices
    shape, place = shape_of_node(numbers), len(counts)
    if not are_row_numbers(counts, shape_of_node(source)[:place], shape):
        return None
    return _Numbers(source, numbers, len(shape), place, len(shape), is_viewed=True)


def _counts(index: fx.Node, rows: Size, rank: int) -> int | None:
    """Return the dimension (of `rank`) along which an index enumerates all rows, if it is constant along all others."""
    own = shape_of_node(index)
    while index.target in (aten.unsqueeze.default, aten.expand.default, *VIEWS):
        before = shape_of_node(node_argument(index))
        if index.target is aten.expand.default:
            own = (1,) * (len(own) - len(before)) + before if own == shape_of_node(index) else ()
        index = node_argument(index)
    wide = [place for place, size in enumerate(own) if size != 1]
    is_vector = len(shape_of_node(index)) == 1 and len(wide) == 1 and own[wide[0]] == shape_of_node(index)[0]
    return wide[0] + rank - len(own) if is_vector and repeats(index, rows) == 1 else None


def _in_range(found: _Numbers, writer: GraphWriter) -> fx.Node:
    """Wrap negative indices, and assert that all indices are in range."""
    numbers, size = found.numbers, size_arguments(found.source, writer)[found.place]
    is_from_end, from_start = writer.call(aten.lt.Scalar, numbers, 0), writer.call(aten.add.Tensor, numbers, size)
    counted = writer.call(aten.where.self, is_from_end, from_start, numbers)
    inside = writer.call(aten.ge.Scalar, counted, 0), writer.call(aten.lt.Scalar, counted, size)
    is_there = writer.call(aten.all.default, writer.call(aten.bitwise_and.Tensor, *inside))
    writer.call(aten._assert_async.msg, is_there, f"index out of bounds for dimension {found.place}")
    return counted


def _hit(found: _Numbers, writer: GraphWriter) -> fx.Node:
    """[b t 1 ...]: whether a row's number equals the requested index."""
    counted, size = _in_range(found, writer), size_arguments(found.source, writer)[found.place]
    position = writer.call(aten.arange.default, size, device=counted.meta[VALUE].device)
    for _ in range(found.dim):
        position = writer.call(aten.unsqueeze.default, position, 0)
    position = _unsqueezed(position, found.dim + 1, found.rows + 1, writer)
    hit = writer.call(aten.eq.Tensor, position, writer.call(aten.unsqueeze.default, counted, found.dim))
    return _unsqueezed(hit, found.rows + 1, found.rank + 1, writer)


def _unsqueezed(node: fx.Node, rank: int, target_rank: int, writer: GraphWriter) -> fx.Node:
    for dim in range(rank, target_rank):
        node = writer.call(aten.unsqueeze.default, node, dim)
    return node


def _number(value: float, like: fx.Node, writer: GraphWriter) -> fx.Node:
    own = like.meta[VALUE]
    return writer.call(aten.full.default, [], value, dtype=own.dtype, device=own.device)
