"""Rules of indexing: rows follow the index tensor; the indexed axis of the table is needed in full."""

from __future__ import annotations

import math

import torch

from streamfx.ir.ranges import is_exact_in
from streamfx.ir.signature import LetterShape, Signature, full_axes
from streamfx.node_meta import VALUE, WRITES_EACH_ONCE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.ranges.casts import holds_integers
from streamfx.passes.ops.ranges.transfer import max_size
from streamfx.passes.ops.rules.registry import RuleCall, rule

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(call: RuleCall) -> Signature:
    """The result's rows have the labels of the index; the vocabulary is needed in full."""
    rank = len(call.shapes[1])
    index = tuple((i,) for i in range(rank))
    vocabulary, width = (rank,), (rank + 1,)
    return Signature(((vocabulary, width), index), ((*index, width),), index=full_axes(*vocabulary))


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: RuleCall) -> Signature | None:
    """Sum the rows of the gradient into a table: the positions are contracted, the vocabulary is needed in full."""
    if call.arguments()["scale_grad_by_freq"]:
        return None
    rank = len(call.shapes[1])
    index = tuple((i,) for i in range(rank))
    vocabulary, width = (rank,), (rank + 1,)
    return Signature(((*index, width), index), ((vocabulary, width),), index=full_axes(*vocabulary))


@rule(aten.bucketize.Tensor)
def bucketize(call: RuleCall) -> Signature:
    """Compare each number with all boundaries, which are needed in full."""
    rank = len(call.shape)
    numbers = tuple((i,) for i in range(rank))
    return Signature((numbers, ((rank,),)), (numbers,), index=full_axes(rank))


@rule(aten.gather.default)
def gather(call: RuleCall) -> Signature | None:
    """The indexed dimension is needed in full; all other dimensions must have equal sizes."""
    rank, dim = len(call.shape), call.arguments()["dim"]
    if not rank:
        return None
    dim %= rank
    source, index = call.shapes
    if any(source[i] != index[i] for i in range(rank) if i != dim):
        return None
    letters = tuple((i,) for i in range(rank))
    indexed = (*letters[:dim], (rank,), *letters[dim + 1 :])
    return Signature((indexed, letters), (letters,), index=full_axes(rank))


@rule(aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.scatter_reduce.two)
def scatter(call: RuleCall) -> Signature | None:
    """The transpose of `gather`: the written dimension of the target is needed in full.

    If each index is written exactly once, the target's old values do not matter, and the result is a sum over the
    source rows.
    """
    rank, dim = len(call.shape), call.arguments()["dim"]
    if not rank:
        return None
    dim %= rank
    if any(shape[i] != call.shape[i] for shape in call.shapes for i in range(rank) if i != dim):
        return None
    letters = tuple((i,) for i in range(rank))
    index = (*letters[:dim], (rank,), *letters[dim + 1 :])
    positions = () if WRITES_EACH_ONCE in call.node.meta else (rank,)
    return Signature((letters, *(index,) * (len(call.operands) - 1)), (letters,), index=full_axes(dim, *positions))


@rule(aten.index_select.default)
def index_select(call: RuleCall) -> Signature | None:
    """The result's rows have the label of the index; the indexed dimension is needed in full."""
    rank = len(call.shapes[0])
    if not rank:
        return None
    dim = call.arguments()["dim"] % rank
    letters = tuple((i,) for i in range(rank))
    selected = (rank,)
    result = (*letters[:dim], selected, *letters[dim + 1 :])
    index = (selected,) if call.shapes[1] else ()
    return Signature((letters, index), (result,), index=full_axes(dim))


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: RuleCall) -> Signature | None:
    """`x[i, j, :]`: index tensors are broadcast together, and the dimensions that they index are needed in full."""
    labels = _index_labels(call)
    if labels is None:
        return None
    source, indices, result, indexed = labels
    return Signature((source, *indices), (result,), full_axes(*indexed))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: RuleCall) -> Signature | None:
    """The transpose of `index`. Accumulation into zeros is a sum over positions; otherwise all positions are needed
    at once.
    """
    labels = _index_labels(call)
    if labels is None:
        return None
    target, indices, rows, indexed = labels
    values_shape = call.shapes[-1]
    values = tuple(rows[len(rows) - len(values_shape) + i] if size != 1 else () for i, size in enumerate(values_shape))
    adds_up = call.arguments()["accumulate"] and is_zero(call.operands[0]) and not _is_rounded_count(call)
    positions = frozenset() if adds_up else frozenset(letter for shape in indices for dim in shape for letter in dim)
    return Signature((target, *indices, values), (target,), full_axes(*indexed, *positions))


@rule(aten.index_add.default)
def index_add(call: RuleCall) -> Signature | None:
    """Rows are accumulated into a dimension, which is needed in full; if the target is zero, this is a sum over the rows."""
    rank = len(call.shape)
    if not rank or len(call.operands) != 3:
        return None
    dim = call.arguments()["dim"] % rank
    target, selected = tuple((i,) for i in range(rank)), (rank,)
    source = (*target[:dim], selected, *target[dim + 1 :])
    adds_up = is_zero(call.operands[0]) and not _is_rounded_count(call)
    return Signature(
        (target, (selected,) if call.shapes[1] else (), source), (target,), full_axes(dim, *([] if adds_up else [rank]))
    )


def _is_rounded_count(call: RuleCall) -> bool:
    """Return whether integers are summed in a dtype that may not represent the sum, as bfloat16 above 256.

    Eager's result then depends on the order of summation, and the sum may be used as a number of rows.
    """
    values, source = ValueRanges(), call.operands[-1]
    dtype: torch.dtype = source.meta[VALUE].dtype
    number = values.of(source).constant
    is_number = number is not None and math.isfinite(number) and number == int(number)
    if not dtype.is_floating_point or dtype.itemsize > 2 or not (is_number or holds_integers(source, values)):
        return False
    count = math.prod(max_size(size) for size in call.shapes[-1])
    return not is_exact_in(dtype, 0, count * values.of(source).magnitude)


def _index_labels(call: RuleCall) -> tuple[LetterShape, tuple[LetterShape, ...], LetterShape, frozenset[int]] | None:
    """Return the labels of `x`, of each index tensor and of `x[indices]`, and the labels of `x` that are indexed."""
    indices, rank = call.arguments()["indices"], len(call.shapes[0])
    indexed = [dim for dim, item in enumerate(indices) if item is not None]
    shapes = call.shapes[1 : 1 + len(indexed)]
    if len(shapes) != len(indexed) or any(item.meta[VALUE].dtype == torch.bool for item in call.operands[1 : 1 + len(indexed)]):
        return None
    width = max(len(shape) for shape in shapes)
    full_size_dims = {width - len(shape) + i for shape in shapes for i, size in enumerate(shape) if size != 1}
    positions = tuple((rank + i,) if i in full_size_dims else () for i in range(width))
    letters = tuple(
        tuple(positions[width - len(shape) + i] if size != 1 else () for i, size in enumerate(shape)) for shape in shapes
    )
    source = tuple((dim,) for dim in range(rank))
    kept = tuple(dim for i, dim in enumerate(source) if i not in indexed)
    first = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    return source, letters, (*kept[:first], *positions, *kept[first:]), frozenset(indexed)
