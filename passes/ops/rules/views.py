"""Axis rules of views and copies, which only move elements: they regroup, select and insert axes.

A rule returns a `Signature`: a tuple of axis labels (integers, local to the call) for each dimension of each operand and
result; `()` has size one. Its `index` says what is special along a label: `FullAxis` (`full_axes(...)`): the operator cannot
run on a slice of the axis; `SingleRow`: one row is selected; `Window`: the rows of another label, shifted; `Tile`: blocks of
another label's rows; `ConcatAxes`: other labels' rows one after another. None: no rule covers the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count, islice
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import AxisFactor, Dim
from streamfx.ir.joint import bound_arguments, is_size, node_argument, scalar_argument, shape_of_node
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.signature import AxisLabel, ConcatAxes, Index, LabelShape, Signature, SingleRow, Tile, Window, full_axes
from streamfx.ir.sizes import Size, simplified, size_of
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.registry import RuleCall, rule
from streamfx.torch_private.symbolic_sizes import is_negative

aten = torch.ops.aten
MAX_SINGLE_ROWS = 4  # single-row selections of one axis that stay in loops; if there are more, the axis is needed in full


def _label_each_dim(rank: int) -> LabelShape:
    """Return one axis label per dimension: ((0,), (1,), (2,)) for rank 3."""
    return tuple((label,) for label in range(rank))


@rule(*of_kind(Kind.RESHAPE))
def view(call: RuleCall) -> Signature | None:
    """Axis rule of `view`: [(b t) d] -> [b t d] regroups axis factors (b, t and d), with one label per factor.

    If an axis is split into blocks, or flattened from blocks, the block axis is a `Tile` of the axis of rows: chunks must
    have complete blocks. None if the new sizes do not group the factors.
    """
    dims_after = call.axes.regroup(tuple(factor for dim in call.dims(0) for factor in dim), call.shape)
    if dims_after is None:
        return None
    dims_before = call.dims(0)  # read now, because `regroup` may split factors
    fresh_labels, factors, index = count(), dict[int, Dim](), dict[int, Index]()
    operand, result = list[int](), list[int]()  # one label per axis factor, in order
    old, new = ([factor for dim in dims for factor in dim] for dims in (dims_before, dims_after))  # the factors still unmatched
    while old and new:
        prefix_lengths = _matching_prefix(call, old, new)
        if prefix_lengths is None:
            return None
        num_old, num_new = prefix_lengths
        is_same = old[:num_old] == new[:num_new]
        old_labels = [next(fresh_labels) for _ in range(num_old)]
        new_labels = old_labels if is_same else [next(fresh_labels) for _ in range(num_new)]
        for label, factor in zip((*old_labels, *new_labels), (*old[:num_old], *new[:num_new]), strict=True):
            factors[label] = (factor,)
        if not is_same:  # one axis of rows on one side, (blocks, rows per block) on the other
            blocks, rows = (new_labels, old_labels) if num_old == 1 else (old_labels, new_labels)
            index |= {**full_axes(*old_labels, *new_labels), blocks[0]: Tile(rows[0])}
        operand, result = operand + old_labels, result + new_labels
        old, new = old[num_old:], new[num_new:]
    return Signature((_grouped(operand, dims_before),), (_grouped(result, dims_after),), index, factors=factors)


def _matching_prefix(call: RuleCall, old: list[AxisFactor], new: list[AxisFactor]) -> tuple[int, int] | None:
    """Return how many leading axis factors before (`old`) and after (`new`) a view cover the same elements.

    (1, 1) for the same axis; (1, 2) if an axis is split into (blocks, rows per block); (2, 1) for the reverse; else None.
    """
    if old[0] == new[0]:
        return 1, 1
    if call.axes.are_blocks(old[0], tuple(new[:2])):
        return 1, 2
    return (2, 1) if call.axes.are_blocks(new[0], tuple(old[:2])) else None


def _grouped(labels: Sequence[int], dims: Sequence[Dim]) -> LabelShape:
    """Group a flat list of labels, one per axis factor, by dimension: [0, 1, 2] with dims (b t), d -> ((0, 1), (2,))."""
    remaining = iter(labels)
    return tuple(tuple(next(remaining) for _ in dim) for dim in dims)


@rule(aten.view.dtype)
def view_dtype(call: RuleCall) -> Signature | None:
    """Axis rule of `view(dtype)`, which reinterprets bytes. With an equal element size, all axes are kept.

    Otherwise the last dimension changes its size: the operand's is read in full, and the result's is a new axis, also in
    full. A scalar has no dimension to resize: no rule.
    """
    operand, result = _label_each_dim(len(call.shapes[0])), _label_each_dim(len(call.shape))
    if call.node.args[1].itemsize == node_argument(call.node).meta[VALUE].element_size():  # type: ignore[union-attr]
        return Signature((operand,), (result,))
    if not operand:
        return None
    new_label = len(operand)
    return Signature((operand,), ((*result[:-1], (new_label,)),), index=full_axes(new_label - 1, new_label))


@rule(aten.unsqueeze.default)
def unsqueeze(call: RuleCall) -> Signature:
    """Axis rule of `unsqueeze`: a dimension of size one, without a label, is inserted."""
    labels = list(_label_each_dim(len(call.shapes[0])))
    result = labels.copy()
    result.insert(call.arguments()["dim"] % len(call.shape), ())
    return Signature((tuple(labels),), (tuple(result),))


@rule(*of_kind(Kind.SQUEEZE))
def squeeze(call: RuleCall) -> Signature:
    """Axis rule of `squeeze`: the requested dimensions that have size one disappear; others keep their labels."""
    removed = squeezed_dims(call.node)
    labels = tuple((i,) if size != 1 else () for i, size in enumerate(call.shapes[0]))
    return Signature((labels,), (tuple(dim for i, dim in enumerate(labels) if i not in removed),))


def squeezed_dims(node: fx.Node) -> list[int]:
    """Return the dimensions that a `squeeze` removes, in order: the requested ones (by default all) that have size one.

    Sizes are those of the full sequence: a chunk of one row still has that dimension.
    """
    shape, requested = shape_of_node(node_argument(node)), bound_arguments(node).get("dim")
    dims = range(len(shape)) if requested is None else (requested if isinstance(requested, (list, tuple)) else [requested])
    return sorted({dim % len(shape) for dim in dims if shape[dim] == 1}) if shape else []


@rule(aten.expand.default)
def expand(call: RuleCall) -> Signature:
    """Axis rule of `expand`: a repeated dimension gets a new axis, of which any slice can be computed separately."""
    operand_shape, shape = call.shapes[0], call.shape
    num_new_dims = len(shape) - len(operand_shape)
    result = _label_each_dim(len(shape))
    operand = tuple(result[num_new_dims + i] if size != 1 else () for i, size in enumerate(operand_shape))
    return Signature((operand,), (result,))


@rule(aten.permute.default)
def permute(call: RuleCall) -> Signature:
    """Axis rule of `permute`: each dimension keeps its label."""
    labels = _label_each_dim(len(call.shape))
    order = call.arguments()["dims"]
    return Signature((labels,), (tuple(labels[dim % len(labels)] for dim in order),))


@rule(aten.transpose.int, aten.t.default)
def transpose(call: RuleCall) -> Signature:
    """Axis rule of `transpose` and `t`: two dimensions exchange their labels; of fewer than two, nothing changes."""
    labels = _label_each_dim(len(call.shape))
    arguments, swapped, rank = call.arguments(), list(labels), len(labels)
    if rank > 1:
        a, b = arguments.get("dim0", 0) % rank, arguments.get("dim1", 1) % rank
        swapped[a], swapped[b] = swapped[b], swapped[a]
    return Signature((labels,), (tuple(swapped),))


@rule(aten.select.int)
def select(call: RuleCall) -> Signature:
    """Axis rule of `x.select(dim, index)`: one row is selected, in the chunk that has it (or see `_selected_row`)."""
    labels = _label_each_dim(len(call.shapes[0]))
    dim = call.arguments()["dim"] % len(labels)
    result = labels[:dim] + labels[dim + 1 :]
    index, length = call.arguments()["index"], call.shapes[0][dim]
    return Signature((labels,), (result,), _selected_row(call, dim, _nonnegative_index(index, length)))


@rule(aten.select_backward.default)
def select_backward(call: RuleCall) -> Signature:
    """Axis rule of the backward of `select`: the gradient of one row becomes that row of the result, with zeros elsewhere."""
    result = _label_each_dim(len(call.shape))
    dim = call.arguments()["dim"] % len(result)
    operand = result[:dim] + result[dim + 1 :]
    index, length = call.arguments()["index"], call.shape[dim]
    return Signature((operand,), (result,), _selected_row(call, dim, _nonnegative_index(index, length)))


@rule(aten.diagonal.default)
def diagonal(call: RuleCall) -> Signature:
    """Axis rule of `diagonal`: the elements (i, i + offset) of two dimensions, needed in full, become a new last dimension."""
    return Signature(*_diagonal(call, len(call.shapes[0])))


@rule(aten.diagonal_backward.default)
def diagonal_backward(call: RuleCall) -> Signature:
    """Axis rule of the backward of `diagonal`: the gradient fills the diagonal of two dimensions, which are new axes in full."""
    (full_value,), (selected,), index = _diagonal(call, len(call.shape))
    return Signature((selected,), (full_value,), index)


def _diagonal(call: RuleCall, rank: int) -> tuple[tuple[LabelShape], tuple[LabelShape], dict[AxisLabel, Index]]:
    """Return (labels of the full value, labels of its diagonal, access to labels). For dims 1, 2 of rank 3: [0 1 2], [0 3]."""
    labels, dims = _label_each_dim(rank), {call.arguments()[name] % rank for name in ("dim1", "dim2")}
    remaining = tuple(label for dim, label in enumerate(labels) if dim not in dims)
    return (labels,), ((*remaining, (rank,)),), full_axes(*dims, rank)


def _nonnegative_index(index: Any, length: Size) -> Any:
    """Return an index along an axis of this length; a negative integer, which counts from the end, becomes nonnegative."""
    return simplified(length + index) if isinstance(index, int) and index < 0 else index


def _selected_row(call: RuleCall, dim: int, row: Any) -> dict[AxisLabel, Index]:
    """Return how a node accesses the axis `dim` (= its label) of which it selects or writes one row.

    `SingleRow(row)`: only the chunk with that row does. A row known only at run time, or one of many, needs the axis in full.
    """
    return full_axes(dim) if isinstance(row, fx.Node) or is_one_of_many_rows(call.node) else {dim: SingleRow(row)}


def is_one_of_many_rows(node: fx.Node) -> bool:
    """Return whether more than `MAX_SINGLE_ROWS` calls of a node's operator select, or write, other rows of equal shapes."""
    shapes, *own_row = _row_arguments(node)

    def differs_only_in_row(other: fx.Node) -> bool:
        """Return whether another call of the operator selects, or writes, another row of a value of equal shape."""
        other_shapes, *other_row = _row_arguments(other)
        return shapes == other_shapes and own_row != other_row

    similar_nodes = filter(differs_only_in_row, node.graph.find_nodes(op="call_function", target=node.target))
    return any(islice(similar_nodes, MAX_SINGLE_ROWS, None))


def _row_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return ((shape of the operand, shape of the row, dimension), row index ...) of a node that selects or writes a row."""
    operand_shape = shape_of_node(node_argument(node))
    if node.target in (aten.select.int, aten.slice.Tensor):  # (x, dim, index ...)
        return (operand_shape, shape_of_node(node), *node.args[1:2]), *node.args[2:]
    return (operand_shape, *node.args[1:3]), *node.args[3:]  # (gradient, shape of x, dim, index ...)


def _new_axis_along(call: RuleCall, dim: int, rank: int, num_results: int = 1) -> Signature:
    """Return a signature with separate axes along `dim`, both needed in full: label `dim` of operands, `rank` of results."""
    operand = _label_each_dim(rank)
    result = (*operand[:dim], (rank,), *operand[dim + 1 :])
    return Signature((operand,) * len(call.operands), (result,) * num_results, index=full_axes(dim, rank))


def slice_start(start: Any, length: Any) -> Size | None:
    """Return the first row of a slice of an axis with `length` rows, as torch defines it; `start` is the slice's argument.

    None starts at 0; negative indices count from the end, and clamp to the first row. A sign that depends on a dynamic size
    becomes a guard; return None if no guard is possible.
    """
    number = start.meta[VALUE] if isinstance(start, fx.Node) else start
    if number is None:
        return 0
    if (from_end := is_negative(number)) is None:
        return None
    number = number + length if from_end else number
    before_start = is_negative(number) if from_end else False
    if before_start is None:
        return None
    return 0 if before_start else size_of(number)


@rule(aten.slice.Tensor)
def slice_(call: RuleCall) -> Signature | None:
    """Axis rule of `x[start:end]` along one dimension: the result's axis is new, a `Window` that starts at row `start`.

    A slice of one row is a `SingleRow`, of all rows the same axis; with a step other than 1, both axes are needed in full.
    None if the start's sign is unknown.
    """
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    length, kept_length = call.shapes[0][dim], call.shape[dim]
    operand = _label_each_dim(rank)
    if kept_length == length:
        return Signature((operand,), (operand,))
    start = slice_start(call.arguments()["start"], call.operands[0].meta[VALUE].shape[dim])
    if start is None:
        return None
    if kept_length == 1:
        result = (*operand[:dim], (), *operand[dim + 1 :])
        return Signature((operand,), (result,), _selected_row(call, dim, start))
    signature = _new_axis_along(call, dim, rank)
    if call.arguments()["step"] != 1:
        return signature
    return Signature(signature.operands, signature.results, {rank: Window(dim, start)})


@rule(aten.slice_backward.default)
def slice_backward(call: RuleCall) -> Signature | None:
    """Axis rule of the backward of `slice`: the gradient's rows, surrounded by zeros, are a window of the result's rows."""
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    length, kept_length = call.shape[dim], call.shapes[0][dim]
    operand = _label_each_dim(rank)
    if kept_length == length:
        return Signature((operand,), (operand,))
    start = slice_start(call.arguments()["start"], call.node.meta[VALUE].shape[dim])
    if start is None:
        return None
    if kept_length == 1:
        row = (*operand[:dim], (), *operand[dim + 1 :])
        return Signature((row,), (operand,), _selected_row(call, dim, start))
    signature = _new_axis_along(call, dim, rank)
    if call.arguments()["step"] != 1:
        return signature
    return Signature(signature.operands, signature.results, {rank: Window(dim, -start)})


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(call: RuleCall) -> Signature:
    """Axis rule of padding: row i of the padded axis is row i - before of the operand's (`Window`)."""
    rank, pad = len(call.shape), [scalar_argument(size) for size in call.arguments()["pad"]]
    padded = {rank - 1 - i // 2 for i in range(len(pad)) if pad[i] != 0}  # pad: (before, after), from the last dimension on
    operand = _label_each_dim(rank)
    result = tuple((rank + i,) if i in padded else operand[i] for i in range(rank))
    if len(padded) == 1:
        (dim,) = padded
        before = pad[2 * (rank - 1 - dim)]
        return Signature((operand,), (result,), {rank + dim: Window(dim, -before)})
    return Signature((operand,), (result,), full_axes(*padded, *(rank + dim for dim in padded)))  # several padded axes


@rule(*of_kind(Kind.SPLIT, Kind.UNBIND))
def split(call: RuleCall) -> Signature:
    """Axis rule of `split` and `unbind`: one dimension is needed in full, and each slice has a new axis (a row has none)."""
    rank = len(call.shapes[0])
    dim = call.arguments()["dim"] % rank
    operand = _label_each_dim(rank)
    if call.node.target is aten.unbind.int:
        kept = operand[:dim] + operand[dim + 1 :]
        return Signature((operand,), (kept,) * len(call.result_shapes), index=full_axes(dim))
    pieces = range(rank, rank + len(call.result_shapes))
    results = tuple((*operand[:dim], (piece,), *operand[dim + 1 :]) for piece in pieces)
    return Signature((operand,), results, index=full_axes(dim, *pieces))


@rule(aten.cat.default, aten.stack.default)
def cat(call: RuleCall) -> Signature:
    """Axis rule of `cat` and `stack` along `dim`; each operand has its own axis there, needed in full (`stack`: none).

    If all operands of `cat` have the result's rank, the result's axis is a `ConcatAxes`, with each operand's first row: the
    axis analysis may find that the operands are slices of one sequence, so that the result can be chunked.
    """
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    result = _label_each_dim(rank)
    if call.node.target is aten.stack.default:
        return Signature((result[:dim] + result[dim + 1 :],) * len(call.operands), (result,), index=full_axes(dim))
    operand_labels = range(rank, rank + len(call.shapes))
    operands = tuple(
        (*result[:dim], (label,), *result[dim + 1 :]) if len(shape) == rank else ((label,),)  # torch allows empty vectors
        for label, shape in zip(operand_labels, call.shapes, strict=True)
    )
    index: dict[AxisLabel, Index] = full_axes(dim, *operand_labels)
    if all(len(shape) == rank for shape in call.shapes):
        lengths = [shape[dim] for shape in call.shapes]
        index[dim] = ConcatAxes(tuple(zip(operand_labels, accumulate(lengths[:-1], initial=0), strict=True)))
    return Signature(operands, (result,), index)


@rule(aten.repeat.default)
def repeat(call: RuleCall) -> Signature:
    """Axis rule of `repeat`: dimensions of size one get a new axis, as in `expand`; others become [t] -> [(n t)].

    The n copies are a new, outer axis factor (`factors` maps both labels of such a dimension to their factors).
    """
    repeats_argument = call.arguments()["repeats"]
    repeats = [size_of(item.meta[VALUE] if is_size(item) else item) for item in repeats_argument]
    rank = len(call.shape)
    num_new_dims = rank - len(call.shapes[0])
    operand, result, factors = list[tuple[AxisLabel, ...]](), [*_label_each_dim(rank)], dict[int, Dim]()
    for i, (size, dim) in enumerate(zip(call.shapes[0], call.dims(0), strict=True), num_new_dims):
        operand.append(result[i] if size != 1 else ())
        if size != 1 and repeats[i] != 1:
            factors |= {i: dim, rank + i: call.axes.fresh(repeats[i])}
            result[i] = (rank + i, i)
    return Signature((tuple(operand),), (tuple(result),), factors=factors)


@rule(aten.select_scatter.default)
def select_scatter(call: RuleCall) -> Signature:
    """Axis rule of (x, row) -> x with one row overwritten along `dim`, which is needed in full."""
    labels = _label_each_dim(len(call.shape))
    dim = call.arguments()["dim"] % len(labels)
    return Signature((labels, labels[:dim] + labels[dim + 1 :]), (labels,), index=full_axes(dim))


@rule(aten.slice_scatter.default)
def slice_scatter(call: RuleCall) -> Signature:
    """Axis rule of (x, rows) -> x with a slice overwritten along `dim`; x and the rows have separate axes there, in full."""
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    labels = _label_each_dim(rank)
    written = (*labels[:dim], (rank,), *labels[dim + 1 :])
    return Signature((labels, written), (labels,), index=full_axes(dim, rank))


@rule(*of_kind(Kind.REORDER))
def reorder(call: RuleCall) -> Signature:
    """Axis rule of `flip` and `roll`: rows move along some dimensions, which are needed in full and new in the result."""
    rank = len(call.shape)
    dims = call.arguments()["dims"]
    full_dims = {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else (dims,))} or set(range(rank))
    operand = _label_each_dim(rank)
    result = tuple((rank + i,) if i in full_dims else operand[i] for i in range(rank))
    return Signature((operand,), (result,), full_axes(*full_dims, *(rank + i for i in full_dims)))
