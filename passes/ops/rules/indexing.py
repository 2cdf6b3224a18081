"""Axis rules of indexing: rows follow the index tensor; the indexed axis of the table is needed in full.

A rule returns a `Signature`: a tuple of axis labels (integers, local to the call) for each dimension of each operand and
result. Dimensions with one label share an axis, `()` has size one, and a label of operands alone is summed over. A label in
`full_axes(...)` is needed in full: the operator cannot run on a slice of that axis. None: no rule covers the arguments.
"""

from __future__ import annotations

import math

import torch

from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.ranges import is_exact_in
from streamfx.ir.signature import LabelShape, Signature, full_axes
from streamfx.node_meta import VALUE, WRITES_EACH_ONCE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.ranges.casts import holds_integers
from streamfx.passes.ops.ranges.transfer import max_size
from streamfx.passes.ops.rules.registry import RuleCall, rule

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(call: RuleCall) -> Signature:
    """Axis rule of (table [vocabulary, width], index [...]) -> rows [..., width]; the vocabulary is needed in full."""
    rank = len(call.shapes[1])
    index = tuple((i,) for i in range(rank))
    vocabulary, width = (rank,), (rank + 1,)
    return Signature(((vocabulary, width), index), ((*index, width),), index=full_axes(*vocabulary))


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: RuleCall) -> Signature | None:
    """Axis rule of (gradient [..., width], index [...]) -> table [vocabulary, width]: a sum over the indexed rows.

    The vocabulary is produced in full. None if gradients are scaled by frequency, which needs all indices at once.
    """
    if call.arguments()["scale_grad_by_freq"]:
        return None
    rank = len(call.shapes[1])
    index = tuple((i,) for i in range(rank))
    vocabulary, width = (rank,), (rank + 1,)
    return Signature(((*index, width), index), ((vocabulary, width),), index=full_axes(*vocabulary))


@rule(aten.bucketize.Tensor)
def bucketize(call: RuleCall) -> Signature:
    """Axis rule of (numbers [...], boundaries [n]) -> [...]: each number is compared with all boundaries."""
    rank = len(call.shape)
    numbers = tuple((i,) for i in range(rank))
    return Signature((numbers, ((rank,),)), (numbers,), index=full_axes(rank))


@rule(aten.gather.default)
def gather(call: RuleCall) -> Signature | None:
    """Axis rule of `gather` along `dim`: the result has the index's labels; the source's `dim` is needed in full.

    None unless source and index have equal sizes in all other dimensions.
    """
    rank, dim = len(call.shape), call.arguments()["dim"]
    if not rank:
        return None
    dim %= rank
    source, index = call.shapes
    if any(source[i] != index[i] for i in range(rank) if i != dim):
        return None
    labels = tuple((i,) for i in range(rank))
    indexed = (*labels[:dim], (rank,), *labels[dim + 1 :])
    return Signature((indexed, labels), (labels,), index=full_axes(rank))


@rule(aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.scatter_reduce.two)
def scatter(call: RuleCall) -> Signature | None:
    """Axis rule of `scatter` along `dim`, (target, index, source?) -> target: the target's `dim` is needed in full.

    The rows of index and source have a separate label, needed in full, too: their order matters. But if each target row is
    written exactly once (`WRITES_EACH_ONCE`), the target's old values do not matter, and the result is a sum over source
    rows. None if other dimensions differ in size.
    """
    rank, dim = len(call.shape), call.arguments()["dim"]
    if not rank:
        return None
    dim %= rank
    if any(shape[i] != call.shape[i] for shape in call.shapes for i in range(rank) if i != dim):
        return None
    labels = tuple((i,) for i in range(rank))
    index = (*labels[:dim], (rank,), *labels[dim + 1 :])
    full_source = () if WRITES_EACH_ONCE in call.node.meta else (rank,)
    return Signature((labels, *(index,) * (len(call.operands) - 1)), (labels,), index=full_axes(dim, *full_source))


@rule(aten.index_select.default)
def index_select(call: RuleCall) -> Signature | None:
    """Axis rule of (x, index [n]) -> x with the n indexed rows along `dim`, which is needed in full. None for a scalar x."""
    rank = len(call.shapes[0])
    if not rank:
        return None
    dim = call.arguments()["dim"] % rank
    labels = tuple((i,) for i in range(rank))
    selected = (rank,)
    result = (*labels[:dim], selected, *labels[dim + 1 :])
    index = (selected,) if call.shapes[1] else ()
    return Signature((labels, index), (result,), index=full_axes(dim))


@rule(*of_kind(Kind.LOOKUP))
def index(call: RuleCall) -> Signature | None:
    """Axis rule of `x[i, j, :]`: index tensors are broadcast together, and the dimensions that they index are needed in full.

    None if an index is a boolean mask.
    """
    labels = _index_labels(call)
    if labels is None:
        return None
    source, indices, result, indexed = labels
    return Signature((source, *indices), (result,), full_axes(*indexed))


@rule(*of_kind(Kind.PUT))
def index_put(call: RuleCall) -> Signature | None:
    """Axis rule of `target[i, j, :] = values`, or `+=` with `accumulate`: the indexed dimensions are needed in full.

    Accumulation into zeros is a sum over the rows of the indices; otherwise, all of them are needed at once. None if an
    index is a boolean mask.
    """
    labels = _index_labels(call)
    if labels is None:
        return None
    target, indices, rows, indexed = labels  # rows: of `target[i, j, :]`; indexed: the labels of its indexed dimensions
    values_shape = call.shapes[-1]
    values = tuple(rows[len(rows) - len(values_shape) + i] if size != 1 else () for i, size in enumerate(values_shape))
    adds_up = call.arguments()["accumulate"] and is_zero(call.operands[0]) and not _is_rounded_count(call)
    full_rows = frozenset() if adds_up else frozenset(label for shape in indices for dim in shape for label in dim)
    return Signature((target, *indices, values), (target,), full_axes(*indexed, *full_rows))


@rule(aten.index_add.default)
def index_add(call: RuleCall) -> Signature | None:
    """Axis rule of (target, index [n], source with n rows) -> target plus source rows, along `dim`, which is needed in full.

    If the target is zero, this is a sum over the n rows; otherwise, all of them are needed at once.
    """
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
    """Return whether the last operand holds integers in a dtype of at most 16 bits that may round their sum (bfloat16: 256).

    The result of a loop would then differ from eager's, which depends on its order of summation, and the sum may be used
    as a number of rows: such a sum is not split into chunks.
    """
    values, source = ValueRanges(), call.operands[-1]
    dtype: torch.dtype = source.meta[VALUE].dtype
    number = values.of(source).constant
    is_number = number is not None and math.isfinite(number) and number == int(number)
    if not dtype.is_floating_point or dtype.itemsize > 2 or not (is_number or holds_integers(source, values)):
        return False
    count = math.prod(max_size(size) for size in call.shapes[-1])
    return not is_exact_in(dtype, 0, count * values.of(source).magnitude)


def _index_labels(call: RuleCall) -> tuple[LabelShape, tuple[LabelShape, ...], LabelShape, frozenset[int]] | None:
    """Return the axis labels of `x`, of each index tensor and of `x[indices]`, and the labels of `x` that are indexed.

    `x[i, :]`, x [5, 4], i [3]: ((0,), (1,)), (((2,),),), ((2,), (1,)), {0}. None if an index is a boolean mask.
    """
    indices, rank = call.arguments()["indices"], len(call.shapes[0])
    indexed = [dim for dim, item in enumerate(indices) if item is not None]
    shapes = call.shapes[1 : 1 + len(indexed)]
    if len(shapes) != len(indexed) or any(item.meta[VALUE].dtype == torch.bool for item in call.operands[1 : 1 + len(indexed)]):
        return None
    index_rank = max(len(shape) for shape in shapes)  # of the indices after broadcasting
    full_size_dims = {index_rank - len(shape) + i for shape in shapes for i, size in enumerate(shape) if size != 1}
    broadcast_index = tuple((rank + i,) if i in full_size_dims else () for i in range(index_rank))
    index_labels = tuple(
        tuple(broadcast_index[index_rank - len(shape) + i] if size != 1 else () for i, size in enumerate(shape))
        for shape in shapes
    )
    source = tuple((dim,) for dim in range(rank))
    kept = tuple(dim for i, dim in enumerate(source) if i not in indexed)
    are_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    index_dim = indexed[0] if are_adjacent else 0  # where torch puts the indices' dimensions in the result
    return source, index_labels, (*kept[:index_dim], *broadcast_index, *kept[index_dim:]), frozenset(indexed)
