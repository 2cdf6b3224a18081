"""Rules of views and copies, which only move elements: they regroup, select and insert axes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count, islice
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import Atom, Dim
from streamfx.ir.joint import bound_arguments, is_size, node_argument, scalar_argument, shape_of_node
from streamfx.ir.signature import ConcatAxes, Index, Letter, LetterDim, LetterShape, Signature, SingleRow, Tile, Window, full_axes
from streamfx.ir.sizes import Size, simplified, size_of
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.registry import RuleCall, rule
from streamfx.passes.ops.traits import CUTS
from streamfx.torch_private.symbolic_sizes import is_negative

aten = torch.ops.aten
MAX_SINGLE_ROWS = 4  # single-row selections of one axis that stay in loops; if there are more, the axis is needed in full


def _own_letters(rank: int) -> LetterShape:
    """Return one label per dimension: 0, 1, 2, ..."""
    return tuple((letter,) for letter in range(rank))


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
def view(call: RuleCall) -> Signature | None:
    """Regroup axis factors, with one label per factor.

    If an axis is split into blocks, or flattened from blocks, chunks must have complete blocks.
    """
    groups = call.axes.regroup(tuple(atom for dim in call.dims(0) for atom in dim), call.shape)
    if groups is None:
        return None
    before = call.dims(0)
    fresh_labels, atoms, index = count(), dict[int, Dim](), dict[int, Index]()
    operand, result = list[int](), list[int]()
    old, new = ([atom for dim in dims for atom in dim] for dims in (before, groups))
    while old and new:
        prefix_lengths = _matching_prefix(call, old, new)
        if prefix_lengths is None:
            return None
        old_count, new_count = prefix_lengths
        is_same = old[:old_count] == new[:new_count]
        old_labels = [next(fresh_labels) for _ in range(old_count)]
        new_labels = old_labels if is_same else [next(fresh_labels) for _ in range(new_count)]
        for letter, atom in zip((*old_labels, *new_labels), (*old[:old_count], *new[:new_count]), strict=True):
            atoms[letter] = (atom,)
        if not is_same:
            tile, rows = (new_labels, old_labels) if old_count == 1 else (old_labels, new_labels)
            index |= {**full_axes(*old_labels, *new_labels), tile[0]: Tile(rows[0])}
        operand, result, old, new = operand + old_labels, result + new_labels, old[old_count:], new[new_count:]
    letters = (_grouped(operand, before),), (_grouped(result, groups),)
    return Signature(*letters, index, atoms=atoms)


def _matching_prefix(call: RuleCall, old: list[Atom], new: list[Atom]) -> tuple[int, int] | None:
    """Return how many leading factors on each side cover the same elements: (1, 1), or (1, 2) for an axis and its blocks."""
    if old[0] == new[0]:
        return 1, 1
    if call.axes.are_blocks(old[0], tuple(new[:2])):
        return 1, 2
    return (2, 1) if call.axes.are_blocks(new[0], tuple(old[:2])) else None


def _grouped(letters: Sequence[int], dims: Sequence[Dim]) -> LetterShape:
    """Group labels by dimension."""
    remaining = iter(letters)
    return tuple(tuple(next(remaining) for _ in dim) for dim in dims)


@rule(aten.view.dtype)
def view_dtype(call: RuleCall) -> Signature | None:
    """Reinterpret the bytes as another dtype. With an equal element size all axes are kept.

    Otherwise the last dimension changes its size: the operand's is read in full, and the result's is a new axis, also in
    full. A scalar has no dimension to resize: no rule.
    """
    operand, result = _own_letters(len(call.shapes[0])), _own_letters(len(call.shape))
    if call.node.args[1].itemsize == node_argument(call.node).meta[VALUE].element_size():  # type: ignore[union-attr]
        return Signature((operand,), (result,))
    if not operand:
        return None
    new_label = len(operand)
    return Signature((operand,), ((*result[:-1], (new_label,)),), index=full_axes(new_label - 1, new_label))


@rule(aten.unsqueeze.default)
def unsqueeze(call: RuleCall) -> Signature:
    """Insert a dimension of size one."""
    letters = list(_own_letters(len(call.shapes[0])))
    result = letters.copy()
    result.insert(call.arguments()["dim"] % len(call.shape), ())
    return Signature((tuple(letters),), (tuple(result),))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(call: RuleCall) -> Signature:
    """Remove the requested dimensions that have size one."""
    removed = squeezed_dims(call.node)
    letters = tuple((i,) if size != 1 else () for i, size in enumerate(call.shapes[0]))
    return Signature((letters,), (tuple(dim for i, dim in enumerate(letters) if i not in removed),))


def squeezed_dims(node: fx.Node) -> list[int]:
    """Return the dimensions that `squeeze` removes from a value on the full sequence."""
    shape, requested = shape_of_node(node_argument(node)), bound_arguments(node).get("dim")
    dims = range(len(shape)) if requested is None else (requested if isinstance(requested, (list, tuple)) else [requested])
    return sorted({dim % len(shape) for dim in dims if shape[dim] == 1}) if shape else []


@rule(aten.expand.default)
def expand(call: RuleCall) -> Signature:
    """Repeat dimensions of size one: each gets a new axis, of which any slice can be computed separately."""
    operand_shape, shape = call.shapes[0], call.shape
    skipped = len(shape) - len(operand_shape)
    result = _own_letters(len(shape))
    operand = tuple(result[skipped + i] if size != 1 else () for i, size in enumerate(operand_shape))
    return Signature((operand,), (result,))


@rule(aten.permute.default)
def permute(call: RuleCall) -> Signature:
    """Reorder dimensions; each keeps its label."""
    letters = _own_letters(len(call.shape))
    order = call.arguments()["dims"]
    return Signature((letters,), (tuple(letters[dim % len(letters)] for dim in order),))


@rule(aten.transpose.int, aten.t.default)
def transpose(call: RuleCall) -> Signature:
    """Exchange two dimensions; of fewer than two dimensions, change nothing."""
    letters = _own_letters(len(call.shape))
    arguments, swapped, rank = call.arguments(), list(letters), len(letters)
    if rank > 1:
        a, b = arguments.get("dim0", 0) % rank, arguments.get("dim1", 1) % rank
        swapped[a], swapped[b] = swapped[b], swapped[a]
    return Signature((letters,), (tuple(swapped),))


@rule(aten.select.int)
def select(call: RuleCall) -> Signature:
    """Select one row: in the chunk that has it, or from the full axis if the graph selects many rows of such values."""
    letters = _own_letters(len(call.shapes[0]))
    dim = call.arguments()["dim"] % len(letters)
    result = letters[:dim] + letters[dim + 1 :]
    index, length = call.arguments()["index"], call.shapes[0][dim]
    return Signature((letters,), (result,), _selected_row(call, dim, _nonnegative_index(index, length)))


@rule(aten.select_backward.default)
def select_backward(call: RuleCall) -> Signature:
    """Return the gradient of a row, with zeros elsewhere."""
    result = _own_letters(len(call.shape))
    dim = call.arguments()["dim"] % len(result)
    operand = result[:dim] + result[dim + 1 :]
    index, length = call.arguments()["index"], call.shape[dim]
    return Signature((operand,), (result,), _selected_row(call, dim, _nonnegative_index(index, length)))


@rule(aten.diagonal.default)
def diagonal(call: RuleCall) -> Signature:
    """Select the elements at (i, i + offset) of two dimensions, which are needed in full, as a new last dimension."""
    return Signature(*_diagonal(call, len(call.shapes[0])))


@rule(aten.diagonal_backward.default)
def diagonal_backward(call: RuleCall) -> Signature:
    """Return the gradient of a diagonal, with zeros elsewhere."""
    (full_value,), (selected,), index = _diagonal(call, len(call.shape))
    return Signature((selected,), (full_value,), index)


def _diagonal(call: RuleCall, rank: int) -> tuple[tuple[LetterShape], tuple[LetterShape], dict[Letter, Index]]:
    """Return the labels of a value with two dimensions, and of their diagonal."""
    letters, dims = _own_letters(rank), {call.arguments()[name] % rank for name in ("dim1", "dim2")}
    remaining = tuple(letter for dim, letter in enumerate(letters) if dim not in dims)
    return (letters,), ((*remaining, (rank,)),), full_axes(*dims, rank)


def _nonnegative_index(index: Any, length: Size) -> Any:
    """Convert a negative index, which counts from the end, to one from the start."""
    return simplified(length + index) if isinstance(index, int) and index < 0 else index


def _selected_row(call: RuleCall, dim: int, row: Any) -> dict[Letter, Index]:
    """Return the selected row as an index, or the full axis if many nodes select other rows: an unrolled recurrence."""
    node = call.node
    similar_nodes = (
        other for other in node.graph.find_nodes(op="call_function", target=node.target) if _differs_only_in_row(other, node)
    )
    is_many = isinstance(row, fx.Node) or len(list(islice(similar_nodes, MAX_SINGLE_ROWS + 1))) > MAX_SINGLE_ROWS
    return full_axes(dim) if is_many else {dim: SingleRow(row)}


def _differs_only_in_row(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two nodes select, or write, different rows of values of equal shape."""
    (shapes, *row), (other_shapes, *other_row) = (_row_arguments(node) for node in (first, second))
    return shapes == other_shapes and row != other_row


def _row_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the shapes of the operand and the row with the dimension, and then the row index."""
    operand = shape_of_node(node_argument(node))
    if node.target in (aten.select.int, aten.slice.Tensor):
        return (operand, shape_of_node(node), *node.args[1:2]), *node.args[2:]
    return (operand, *node.args[1:3]), *node.args[3:]


def _new_axis_along(call: RuleCall, dim: int, rank: int, results: int = 1) -> Signature:
    """Return a signature with separate axes of operand and result along `dim`, both needed in full; other axes are kept."""
    operand = _own_letters(rank)
    result = (*operand[:dim], (rank,), *operand[dim + 1 :])
    return Signature((operand,) * len(call.operands), (result,) * results, index=full_axes(dim, rank))


def slice_start(start: Any, length: Any) -> Size | None:
    """Return the first row of a slice of an axis with `length` rows, as torch defines it.

    Negative indices count from the end, and clamp to the first row. A sign that depends on a dynamic size becomes a
    guard; None if no guard is possible.
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
    """Select rows start..end of one dimension: a new axis, shifted against the operand's."""
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    length, kept_length = call.shapes[0][dim], call.shape[dim]
    operand = _own_letters(rank)
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
    """Return the gradient of a slice: the rows of the operand, surrounded by zeros."""
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    length, kept_length = call.shape[dim], call.shapes[0][dim]
    operand = _own_letters(rank)
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
    """Shift the axis that is padded; if two axes are padded at once, both are needed in full."""
    rank, pad = len(call.shape), [scalar_argument(size) for size in call.arguments()["pad"]]
    padded = {rank - 1 - i // 2 for i in range(len(pad)) if pad[i] != 0}
    operand = _own_letters(rank)
    result = tuple((rank + i,) if i in padded else operand[i] for i in range(rank))
    if len(padded) == 1:
        (dim,) = padded
        before = pad[2 * (rank - 1 - dim)]
        return Signature((operand,), (result,), {rank + dim: Window(dim, -before)})
    return Signature((operand,), (result,), full_axes(*padded, *(rank + dim for dim in padded)))


@rule(*CUTS)
def split(call: RuleCall) -> Signature:
    """Cut one dimension into slices: it is needed in full, and each slice has a new axis."""
    rank = len(call.shapes[0])
    dim = call.arguments()["dim"] % rank
    operand = _own_letters(rank)
    if call.node.target is aten.unbind.int:
        kept = operand[:dim] + operand[dim + 1 :]
        return Signature((operand,), (kept,) * len(call.result_shapes), index=full_axes(dim))
    pieces = range(rank, rank + len(call.result_shapes))
    results = tuple((*operand[:dim], (piece,), *operand[dim + 1 :]) for piece in pieces)
    return Signature((operand,), results, index=full_axes(dim, *pieces))


@rule(aten.cat.default, aten.stack.default)
def cat(call: RuleCall) -> Signature:
    """Concatenate along one dimension, needed in full on both sides unless the operands are slices of one sequence."""
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    result = _own_letters(rank)
    if call.node.target is aten.stack.default:
        return Signature((result[:dim] + result[dim + 1 :],) * len(call.operands), (result,), index=full_axes(dim))
    operand_labels = range(rank, rank + len(call.shapes))
    pairs = list(zip(operand_labels, call.shapes, strict=True))
    operands = tuple(
        (*result[:dim], (label,), *result[dim + 1 :]) if len(shape) == rank else ((label,),) for label, shape in pairs
    )
    index: dict[Letter, Index] = full_axes(dim, *operand_labels)
    if all(len(shape) == rank for shape in call.shapes):
        lengths = [shape[dim] for shape in call.shapes]
        index[dim] = ConcatAxes(tuple(zip(operand_labels, accumulate(lengths[:-1], initial=0), strict=True)))
    return Signature(operands, (result,), index)


@rule(aten.repeat.default)
def repeat(call: RuleCall) -> Signature:
    """Repeat dimensions of size one like `expand`; others get the copies as an outer axis: [t] to [(n t)]."""
    repeats_argument = call.arguments()["repeats"]
    repeats = [size_of(item.meta[VALUE] if is_size(item) else item) for item in repeats_argument]
    rank = len(call.shape)
    skipped = rank - len(call.shapes[0])
    operand, result, atoms = list[LetterDim](), list[LetterDim](_own_letters(rank)), dict[int, Dim]()
    for i, (size, dim) in enumerate(zip(call.shapes[0], call.dims(0), strict=True), skipped):
        operand.append(result[i] if size != 1 else ())
        if size != 1 and repeats[i] != 1:
            atoms |= {i: dim, rank + i: call.axes.fresh(repeats[i])}
            result[i] = (rank + i, i)
    return Signature((tuple(operand),), (tuple(result),), atoms=atoms)


@rule(aten.select_scatter.default)
def select_scatter(call: RuleCall) -> Signature:
    """Overwrite one row."""
    letters = _own_letters(len(call.shape))
    dim = call.arguments()["dim"] % len(letters)
    return Signature((letters, letters[:dim] + letters[dim + 1 :]), (letters,), index=full_axes(dim))


@rule(aten.slice_scatter.default)
def slice_scatter(call: RuleCall) -> Signature:
    """Overwrite some rows: the written rows and the result have separate axes."""
    rank = len(call.shape)
    dim = call.arguments()["dim"] % rank
    letters = _own_letters(rank)
    written = (*letters[:dim], (rank,), *letters[dim + 1 :])
    return Signature((letters, written), (letters,), index=full_axes(dim, rank))


@rule(aten.flip.default, aten.roll.default)
def reorder(call: RuleCall) -> Signature:
    """Permute rows along some dimensions, which are needed in full."""
    rank = len(call.shape)
    dims = call.arguments()["dims"]
    full_dims = {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else (dims,))} or set(range(rank))
    operand = _own_letters(rank)
    result = tuple((rank + i,) if i in full_dims else operand[i] for i in range(rank))
    return Signature((operand,), (result,), full_axes(*full_dims, *(rank + i for i in full_dims)))
