"""Find rows selected from a value one by one, and values assembled from rows one by one.

x[:, 0], x[:, 1], ...                                 rows of x
y[:, 0] = a; y[:, 1] = b; ...   or  stack([a, b])     a value whose rows are a, b, ...
select_backward(a, 0) + select_backward(b, 1) + ...   the same: the gradient of the first line

A read and a write of row t belong to step t of an unrolled loop. In a functional graph, `y[:, t] = a` is a `select_scatter`,
which returns a new value; several of them in a row are a *chain of writes*. `select_backward(a, t)` is a zero tensor with
`a` as row t.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, erase_unused, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.linearity import is_affine
from streamfx.passes.ops.row_maps import (
    MIN_LOOP_ROWS,
    RowMove,
    RowSlice,
    find_sources,
    is_plus_zero,
    padded_sums,
    row_read,
    row_write,
)
from streamfx.passes.ops.rules.views import MAX_SINGLE_ROWS, is_one_of_many_rows
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.trim import trim_rows, trim_stacks

aten = torch.ops.aten


@dataclass(frozen=True)
class RowAccess:
    """Row `step` of the `length` rows of `source` along dimension `dim`."""

    source: fx.Node
    dim: int
    step: int
    length: int


@dataclass(frozen=True)
class ConcatAccess:
    """`node` is the concatenation of these rows along `dim`."""

    node: fx.Node
    dim: int
    values: tuple[fx.Node, ...]


@dataclass
class RowAccesses:
    """The nodes that select a row of a value, and the values assembled from rows."""

    reads: dict[fx.Node, RowAccess] = field(default_factory=dict)
    concats: list[ConcatAccess] = field(default_factory=list)


def find_row_accesses(graph: fx.Graph) -> RowAccesses:
    """Return all nodes that select one row of a value, and all stacks of rows (values of at least `MIN_LOOP_ROWS` rows only).

    First simplify the graph in place: a read of a row that a chain of writes has written becomes the written value, and rows
    that are written into zeros, or padded with zeros and summed, become stacks.
    """
    writer = GraphWriter(graph)
    _single_rows(graph)
    erase_unused(graph, is_random)  # random draws have distinct seeds, so unused ones can be dropped
    _stack_assembled(graph, writer)
    _stack_sums(graph, writer)
    trim_rows(_single_rows(graph).reads, writer)
    accesses = _single_rows(graph)
    trim_stacks(graph, {node: (row.source, row.length) for node, row in accesses.reads.items()}, writer)
    trim_rows(accesses.reads, writer)
    erase_unused(graph, is_random)
    accesses = _single_rows(graph)  # the sources may have changed
    for node in graph.nodes:
        if node.target is aten.stack.default and len(node.args[0]) >= MIN_LOOP_ROWS:
            dim = bound_arguments(node)["dim"] % len(shape_of_node(node))
            accesses.concats.append(ConcatAccess(node, dim, tuple(node.args[0])))
    accesses.reads = {node: row for node, row in accesses.reads.items() if node.users}
    return accesses


def _single_rows(graph: fx.Graph) -> RowAccesses:
    """Return the rows selected from values (by `select` or `unbind`), at least `MIN_LOOP_ROWS` of them.

    A read of a row that a `select_scatter` has written is replaced by the written value, in place. If the row was not written,
    the value before all writes is read.
    """
    accesses = RowAccesses()
    for node in list(graph.nodes):
        read = row_read(node)
        length: Any = 0 if read is None else shape_of_node(read.tensor)[read.rows.dim]
        if read is None or not read.is_single or not read.rows.is_static or not isinstance(length, int) or length < MIN_LOOP_ROWS:
            continue
        source, written_value = _before_writes(read) if node.target is aten.select.int else (read.tensor, None)
        if written_value is not None:
            node.replace_all_uses_with(written_value, delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
            continue
        if source is not read.tensor:
            node.update_arg(0, source)
        accesses.reads[node] = RowAccess(source, read.rows.dim, read.rows.start, length)
    return accesses


def _before_writes(read: RowMove) -> tuple[fx.Node, fx.Node | None]:
    """Return the value before all writes that do not write the row that is read; and the value that is written there, if any."""
    source = read.tensor
    while source.target is aten.select_scatter.default and (write := row_write(source)) is not None:
        if write.rows.dim != read.rows.dim or not write.rows.is_static:
            break
        if write.rows == read.rows:
            return source, write.part
        source = node_argument(source)
    return source, None


def _stack_assembled(graph: fx.Graph, writer: GraphWriter) -> None:
    """Replace each value that is assembled from single rows, and zeros, by a stack of them, in place.

    y[:, 0] = a; y[:, 1] = b -> stack([a, b], 1);  cat([stack([a, b]), c[None]]) -> stack([a, b, c])
    pad(stack([a, b]), before) -> stack([0, a, b])
    """
    for node in list(graph.nodes):
        dim = _assembled_dim(node)
        length = 0 if dim is None else shape_of_node(node)[dim]
        pieces = find_sources(node, RowSlice(dim, 0, length)) if dim is not None and isinstance(length, int) else []
        if pieces and all(is_plus_zero(piece.value) or (piece.is_row and not piece.is_added) for piece in pieces):
            rows = [piece.value if piece.is_row else None for piece in pieces for _ in range(piece.num_rows)]
            node.replace_all_uses_with(_stack_rows(rows, dim, node, writer), propagate_meta=False)  # type: ignore[arg-type]


def _assembled_dim(node: fx.Node) -> int | None:
    """Return the dimension of rows if a node concatenates or pads stacks, or is the last of a chain of writes of single rows.

    Return None for other nodes, or if another operator uses a value within the chain.
    """
    if node.target is aten.cat.default:
        has_stack = any(operand.target is aten.stack.default for operand in node.all_input_nodes)
        return bound_arguments(node)["dim"] % len(shape_of_node(node)) if has_stack else None
    if is_kind(node, Kind.PAD):
        return _padded_dim(node)
    dim = _written_dim(node)
    if dim is None or any(_written_dim(user) == dim and node_argument(user) is node for user in node.users):
        return None
    links, link = {node}, node_argument(node)
    while _written_dim(link) == dim:
        if not links.issuperset(link.users):
            return None
        links.add(link)
        link = node_argument(link)
    return dim


def _padded_dim(node: fx.Node) -> int | None:
    """Return the dimension along which a node pads a stack of rows to at most twice as many; None for other paddings."""
    write, operand = row_write(node), node_argument(node)
    if write is None or operand.target is not aten.stack.default:
        return None
    length = shape_of_node(node)[write.rows.dim]
    return write.rows.dim if isinstance(length, int) and length <= 2 * len(operand.args[0]) else None  # type: ignore[arg-type]


def _written_dim(node: fx.Node) -> int | None:
    """Return the dimension along which a `select_scatter` writes one of at least `MIN_LOOP_ROWS` rows; None for others."""
    write = row_write(node) if node.target is aten.select_scatter.default else None
    length = 0 if write is None else shape_of_node(node)[write.rows.dim]
    return write.rows.dim if write is not None and isinstance(length, int) and length >= MIN_LOOP_ROWS else None


def _stack_rows(values: Sequence[fx.Node | None], dim: int, like_node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Insert `stack(values, dim)` before `like_node`, with its metadata, and return it; a row that is None becomes zeros."""
    like, zeros = like_node.meta[VALUE], None
    if None in values:
        sizes = size_arguments(next(value for value in values if value is not None), writer.move_before(like_node))
        zeros = writer.call(aten.full.default, sizes, 0, dtype=like.dtype, device=like.device)
    rows = [zeros if value is None else value for value in values]
    with writer.graph.inserting_before(like_node):
        stacked = writer.graph.call_function(aten.stack.default, (rows, dim))
    stacked.meta = dict(like_node.meta)
    return stacked


def with_plus_zeros(rows: list[fx.Node | None], total: fx.Node, writer: GraphWriter) -> list[fx.Node | None]:
    """Insert `row + 0.0` after each row of a sum that becomes a stack, and return the results.

    In the sum, the zeros of other addends turn -0.0 into 0.0. If the sign of a zero cannot matter, return the rows unchanged.
    """
    if not may_show_sign_of_zero(total):
        return rows
    return [None if row is None else writer.move_before(row.next).call(aten.add.Tensor, row, 0.0) for row in rows]


def may_show_sign_of_zero(value: fx.Node) -> bool:
    """Return whether a later value may differ by more than the sign of a zero if signs of zeros differ in `value`.

    It may not if only affine operators read the value, and values that they compute from it. An output of the graph is the same
    number with either sign.
    """
    driven, node = {value}, value.next
    while node.op != "output":
        if not driven.isdisjoint(node.all_input_nodes):
            if node.target is not operator.getitem and not is_affine(node, driven):
                return True
            driven.add(node)
        node = node.next
    return False


def _stack_sums(graph: fx.Graph, writer: GraphWriter) -> None:
    """Replace each sum of zero-padded rows by stacks of rows, plus the other addends, in place.

    select_backward(a, 0) + select_backward(b, 1) -> stack([a, b]). A sum with less than half of its rows is not replaced if they
    are so few that they may stay in loops; else loops would read all padded rows at once, in full. Several values of a row come
    from several loops, in the order of the graph: there is a stack for each loop.
    """
    for total, padded, others in padded_sums(graph, aten.select_backward.default):
        num_rows = Counter(rows.dim for rows in padded)
        dim = max(num_rows, key=num_rows.__getitem__, default=0)
        length = shape_of_node(total)[dim]
        calls = [moves[0].tensor for rows, moves in padded.items() if rows.dim == dim]
        may_stream = len(calls) <= MAX_SINGLE_ROWS or not is_one_of_many_rows(calls[0])
        if not isinstance(length, int) or length < MIN_LOOP_ROWS or (2 * num_rows[dim] < length and may_stream):
            continue
        others += [move.tensor for rows, moves in padded.items() if rows.dim != dim for move in moves]
        gradients = [[move.part for move in padded.get(RowSlice(dim, step, step + 1), ())] for step in range(length)]
        for loop_index in range(max(map(len, gradients))):
            values = [rows[loop_index] if loop_index < len(rows) else None for rows in gradients]
            values = values if loop_index else with_plus_zeros(values, total, writer)
            others.append(_stack_rows(values, dim, total, writer))
        replacement = others[0]
        for addend in others[1:]:
            replacement = writer.move_before(total).call(aten.add.Tensor, replacement, addend)
        total.replace_all_uses_with(replacement, propagate_meta=False)
