"""Find rows selected from a value one by one, and values assembled from rows one by one.

x[:, 0], x[:, 1], ...                                 rows of x
y[:, 0] = a; y[:, 1] = b; ...   or  stack([a, b])     a value whose rows are a, b, ...
select_backward(a, 0) + select_backward(b, 1) + ...   the same: the gradient of the first line

A read and a write of row t belong to step t of an unrolled loop. In a functional graph, `y[:, t] = a` is a `select_scatter`,
which returns a new value; several of them in a row are a *chain of writes*. `select_backward(a, t)` is a zero tensor with
`a` as row t.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, erase_unused, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import find_fill
from streamfx.passes.ops.row_maps import RowMove, RowSlice, find_sources, padded_sums, row_read, row_write
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.trim import trim_rows, trim_stacks

aten = torch.ops.aten
MIN_ROWS = 3  # rows of a loop: two are more likely to be two halves of a value


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


@dataclass(eq=False)
class _Chain:
    """A chain of writes: each operator in `links` writes one row into the result of the link before; the first one into `root`.

    `written` has, for each row index along `dim`, the indices (in `links`) of the links that write it, and the written values.
    """

    root: fx.Node
    dim: int
    links: list[fx.Node] = field(default_factory=list)
    written: dict[int, tuple[list[int], list[fx.Node]]] = field(default_factory=lambda: defaultdict(lambda: ([], [])))

    def add(self, link: fx.Node, step: int) -> None:
        """Append a link that writes row `step`."""
        link_indices, values = self.written[step]
        link_indices.append(len(self.links))
        values.append(node_argument(link, 1))
        self.links.append(link)

    def row_after(self, link_index: int, step: int) -> fx.Node | None:
        """Return the value of row `step` in the result of `links[link_index]`; None if it is still the row of `root`."""
        link_indices, values = self.written.get(step, ([], []))
        num_writes = bisect_right(link_indices, link_index)
        return values[num_writes - 1] if num_writes else None


def find_row_accesses(graph: fx.Graph) -> RowAccesses:
    """Return all nodes that select one row of a value, and all stacks of rows (values of at least `MIN_ROWS` rows only).

    First simplify the graph in place: a read of a row that a chain of writes has written becomes the written value, and rows
    that are written into zeros, or padded with zeros and summed, become stacks.
    """
    writer = GraphWriter(graph)
    accesses, writes = _single_rows(graph)
    for node in erase_unused(graph, is_random):  # random draws have distinct seeds, so unused ones can be dropped
        writes.pop(node, None)
        accesses.reads.pop(node, None)
    for chain in dict.fromkeys(chain for chain, _ in writes.values()):
        _stack_chain([link for link in chain.links if link in writes], chain, writer)
    _stack_concats(graph, writer)
    _stack_sums(graph, writer)
    trim_rows(accesses.reads, writer)
    accesses, _ = _single_rows(graph)
    trim_stacks(graph, {node: (row.source, row.length) for node, row in accesses.reads.items()}, writer)
    trim_rows(accesses.reads, writer)
    erase_unused(graph, is_random)
    accesses, _ = _single_rows(graph)  # the sources may have changed
    for node in graph.nodes:
        if node.target is aten.stack.default and len(node.args[0]) >= MIN_ROWS:
            dim = bound_arguments(node)["dim"] % len(shape_of_node(node))
            accesses.concats.append(ConcatAccess(node, dim, tuple(node.args[0])))
    accesses.reads = {node: row for node, row in accesses.reads.items() if node.users}
    return accesses


def _single_rows(graph: fx.Graph) -> tuple[RowAccesses, dict[fx.Node, tuple[_Chain, int]]]:
    """Return the rows selected from values (by `select` or `unbind`), and for each write of a row: its chain, and index in it.

    A read of a written row is replaced by the written value, in place.
    """
    accesses = RowAccesses()
    writes: dict[fx.Node, tuple[_Chain, int]] = {}
    for node in list(graph.nodes):
        if node.target is aten.select_scatter.default:
            _record_write(row_write(node), writes)
        elif (read := row_read(node)) is not None:
            _record_read(read, writes, accesses)
    return accesses, writes


def _num_rows(move: RowMove) -> int:
    """Return the number of rows of the tensor of which a single row is read or written; 0 if it is not static, or a range."""
    length = shape_of_node(move.tensor)[move.rows.dim]
    return length if move.is_single and move.rows.is_static and isinstance(length, int) else 0


def _record_write(write: RowMove | None, writes: dict[fx.Node, tuple[_Chain, int]]) -> None:
    """Record a `select_scatter` of one row in `writes`, which has the chain of each write and its index in it.

    It extends the chain whose last link it writes into, otherwise it starts a chain. Do nothing if the row is not static, or if
    the value has fewer than `MIN_ROWS` rows.
    """
    if write is None or _num_rows(write) < MIN_ROWS:
        return
    base = node_argument(write.tensor)
    chain, base_index = writes.get(base, (None, -1))
    if chain is None or chain.dim != write.rows.dim or base_index != len(chain.links) - 1:
        chain = _Chain(base, write.rows.dim)
    writes[write.tensor] = chain, len(chain.links)
    chain.add(write.tensor, write.rows.start)


def _record_read(read: RowMove, writes: dict[fx.Node, tuple[_Chain, int]], accesses: RowAccesses) -> None:
    """Record a read of one row in `accesses.reads`, or replace it by the row's value if a chain of writes has written it.

    If a `select` reads the result of a chain that has not written this row, it reads the value before the chain, in place.
    `writes` has the chain of each write, and its index in it.
    """
    node, source, (dim, step, _), length = read.part, read.tensor, read.rows, _num_rows(read)
    if length < MIN_ROWS:
        return
    while node.target is aten.select.int and source in writes and writes[source][0].dim == dim:
        chain, link_index = writes[source]
        written_value = chain.row_after(link_index, step)
        if written_value is not None:
            node.replace_all_uses_with(written_value, delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
            return
        source = chain.root
        node.update_arg(0, source)
    accesses.reads[node] = RowAccess(source, dim, step, length)


def _stack_chain(links: list[fx.Node], chain: _Chain, writer: GraphWriter) -> None:
    """Replace the result of a chain of writes by a stack of the written rows, in place.

    `links`: the links that are still in the graph. Do nothing if a value between two links has other users, or if rows that
    are not written are not zeros.
    """
    if not links or links != chain.links[: len(links)]:
        return
    *inner, end = links
    if any(user not in links for link in inner for user in link.users):
        return
    length = end.meta[VALUE].shape[chain.dim]
    values = [chain.row_after(len(links) - 1, step) for step in range(length)]
    if None not in values or find_fill(chain.root) == 0:
        end.replace_all_uses_with(_stack_rows(values, chain.dim, end, writer), propagate_meta=False)


def _stack_concats(graph: fx.Graph, writer: GraphWriter) -> None:
    """Replace each concatenation of stacks and rows by one stack, in place: cat([stack([a, b]), c[None]]) -> stack([a, b, c])."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        dim, shape = bound_arguments(node)["dim"] % len(shape_of_node(node)), shape_of_node(node)
        if isinstance(length := shape[dim], int) and any(operand.target is aten.stack.default for operand in node.args[0]):
            pieces = find_sources(node, RowSlice(dim, 0, length))
            if all(piece.is_row and not piece.is_added for piece in pieces):
                values = [piece.value for piece in pieces]
                node.replace_all_uses_with(_stack_rows(values, dim, node, writer), propagate_meta=False)  # type: ignore[arg-type]


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


def _stack_sums(graph: fx.Graph, writer: GraphWriter) -> None:
    """Replace each sum of zero-padded rows by stacks of rows, plus the other addends, in place.

    select_backward(a, 0) + select_backward(b, 1) -> stack([a, b]). A sum with less than half of its rows is not replaced. Several
    values of a row come from several loops, in the order of the graph: there is a stack for each loop.
    """
    for total, padded, others in padded_sums(graph, aten.select_backward.default):
        num_rows = Counter(rows.dim for rows in padded)
        dim = max(num_rows, key=num_rows.__getitem__, default=0)
        length = shape_of_node(total)[dim]
        if not isinstance(length, int) or length < MIN_ROWS or 2 * num_rows[dim] < length:
            continue
        others += [move.tensor for rows, moves in padded.items() if rows.dim != dim for move in moves]
        gradients = [[move.part for move in padded.get(RowSlice(dim, step, step + 1), ())] for step in range(length)]
        for loop_index in range(max(map(len, gradients))):
            values = [rows[loop_index] if loop_index < len(rows) else None for rows in gradients]
            others.append(_stack_rows(values, dim, total, writer))
        replacement = others[0]
        for addend in others[1:]:
            replacement = writer.move_before(total).call(aten.add.Tensor, replacement, addend)
        total.replace_all_uses_with(replacement, propagate_meta=False)
