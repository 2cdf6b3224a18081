"""Find rows selected from a value one by one, and values assembled from rows one by one.

x[:, 0], x[:, 1], ...                                 rows of x
y[:, 0] = a; y[:, 1] = b; ...   or  stack([a, b])     a value whose rows are a, b, ...
select_backward(a, 0) + select_backward(b, 1) + ...   likewise: the gradient of the first line
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, erase_unused, node_argument, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.ops.constants import fill_of
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.trim import cut_rows, cut_stacks, is_plain_sum

aten = torch.ops.aten
FEWEST_ROWS = 3  # rows of a loop: two are more likely to be halves


class RowPlace(NamedTuple):
    """Row `step` of `length` rows along dimension `dim`."""

    dim: int
    step: int
    length: int


@dataclass(frozen=True)
class RowAccess:
    """One of `length` rows of a value."""

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
    joins: list[ConcatAccess] = field(default_factory=list)


@dataclass(eq=False)
class _Chain:
    """Rows written into `root` in sequence; `written` maps each row to (link positions, values)."""

    root: fx.Node
    dim: int
    links: list[fx.Node] = field(default_factory=list)
    written: dict[int, tuple[list[int], list[fx.Node]]] = field(default_factory=lambda: defaultdict(lambda: ([], [])))

    def add(self, link: fx.Node, step: int) -> None:
        """Append a link that writes row `step`."""
        positions, values = self.written[step]
        positions.append(len(self.links))
        values.append(node_argument(link, 1))
        self.links.append(link)

    def at(self, step: int, link: int) -> fx.Node | None:
        """Return the value of a row after a link of the chain; None if it is the root's."""
        positions, values = self.written.get(step, ([], []))
        count = bisect_right(positions, link)
        return values[count - 1] if count else None


def rows_of(graph: fx.Graph) -> RowAccesses:
    """Return all selected rows of a graph, and all values assembled from rows.

    The graph is simplified on the way: reads of a row that was just written are forwarded, and rows that are written
    into zeros, or zero-padded and summed, are stacked.
    """
    writer = GraphWriter(graph)
    accesses, chains = _single_rows(graph)
    for node in erase_unused(graph, is_random):  # random draws have distinct seeds, so unused ones can be dropped
        chains.pop(node, None)
        accesses.reads.pop(node, None)
    for chain in dict.fromkeys(chain for chain, _ in chains.values()):
        _stack_chain([link for link in chain.links if link in chains], chain, writer)
    _stack_sums(graph, writer)
    cut_stacks(graph, {node: (row.source, row.length) for node, row in accesses.reads.items()}, writer)
    cut_rows(accesses.reads, writer)
    erase_unused(graph, is_random)
    accesses, _ = _single_rows(graph)  # the sources may have changed
    for node in graph.nodes:
        if node.target is aten.stack.default and len(node.args[0]) >= FEWEST_ROWS:
            dim = bound_arguments(node)["dim"] % len(shape_of_node(node))
            accesses.joins.append(ConcatAccess(node, dim, tuple(node.args[0])))
    accesses.reads = {node: row for node, row in accesses.reads.items() if node.users}
    return accesses


def _single_rows(graph: fx.Graph) -> tuple[RowAccesses, dict[fx.Node, tuple[_Chain, int]]]:
    """Return the rows selected from values, and, for each link, its chain of writes and position."""
    accesses, chains = RowAccesses(), dict[fx.Node, tuple[_Chain, int]]()
    for node in list(graph.nodes):
        if node.target is aten.select_scatter.default:
            _record_write(node, chains)
        elif node.target is aten.select.int:
            _record_read(node, chains, accesses)
        elif node.target is operator.getitem and node_argument(node).target is aten.unbind.int:
            source = node_argument(node_argument(node))
            row = _static_row(source, bound_arguments(node_argument(node))["dim"], node.args[1])
            if row is not None and row.length >= FEWEST_ROWS:
                accesses.reads[node] = RowAccess(source, *row)
    return accesses, chains


def _static_row(source: fx.Node, dim: Any, step: Any) -> RowPlace | None:
    """Return the row that an operator selects or writes if it is static."""
    shape = shape_of_node(source)
    if not isinstance(dim, int) or not isinstance(step, int) or not isinstance(length := shape[dim % len(shape)], int):
        return None
    return RowPlace(dim % len(shape), step % length, length)


def _record_write(node: fx.Node, chains: dict[fx.Node, tuple[_Chain, int]]) -> None:
    """Record a `select_scatter` as a link of a chain of row writes, a new chain if it extends none."""
    row = _static_row(node, *node.args[2:4])
    same_type = node_argument(node, 1).meta[VALUE].dtype == node.meta[VALUE].dtype  # otherwise the write converts the value
    if row is None or row.length < FEWEST_ROWS or not same_type:
        return
    base = node_argument(node)
    chain, position = chains.get(base, (None, -1))
    if chain is None or chain.dim != row.dim or position != len(chain.links) - 1:
        chain = _Chain(base, row.dim)
    chains[node] = chain, len(chain.links)
    chain.add(node, row.step)


def _record_read(node: fx.Node, chains: dict[fx.Node, tuple[_Chain, int]], accesses: RowAccesses) -> None:
    """Record a selected row; if a chain of writes has just written it, use the written value instead."""
    source = node_argument(node)
    row = _static_row(source, *node.args[1:3])
    if row is None or row.length < FEWEST_ROWS:
        return
    dim, step, length = row
    while source in chains and chains[source][0].dim == dim:
        chain, position = chains[source]
        written_value = chain.at(step, position)
        if written_value is not None:
            node.replace_all_uses_with(written_value, delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
            return
        source = chain.root
    node.update_arg(0, source)
    accesses.reads[node] = RowAccess(source, dim, step, length)


def _stack_chain(remaining: list[fx.Node], chain: _Chain, writer: GraphWriter) -> None:
    """Stack the rows of a chain if only its last link is used in full and nothing but zeros is left of its root."""
    if not remaining or remaining != chain.links[: len(remaining)]:
        return
    *inner, end = remaining
    if any(user not in remaining for link in inner for user in link.users):
        return
    length = end.meta[VALUE].shape[chain.dim]
    values = [chain.at(step, len(remaining) - 1) for step in range(length)]
    if None not in values or fill_of(chain.root) == 0:
        end.replace_all_uses_with(_stack_rows(values, chain.dim, end, writer), propagate_meta=False)


def _stack_rows(values: Sequence[fx.Node | None], dim: int, like_node: fx.Node, writer: GraphWriter) -> fx.Node:
    """Return a value like `like_node` with these rows, and zeros for missing ones."""
    like, zeros = like_node.meta[VALUE], None
    if None in values:
        sizes = size_arguments(next(value for value in values if value is not None), writer.before(like_node))
        zeros = writer.call(aten.full.default, sizes, 0, dtype=like.dtype, device=like.device)
    rows = [zeros if value is None else value for value in values]
    with writer.graph.inserting_before(like_node):
        stacked = writer.graph.call_function(aten.stack.default, (rows, dim))
    stacked.meta = dict(like_node.meta)
    return stacked


def _stack_sums(graph: fx.Graph, writer: GraphWriter) -> None:
    """Stack zero-padded rows that are summed, at the last addition of each sum."""
    partial_sums: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.target is aten.select_backward.default or (
            is_plain_sum(node) and any(item in partial_sums for item in node.args)
        ):
            partial_sums[node] = None
    order = {node: i for i, node in enumerate(graph.nodes)} if partial_sums else {}
    for node in partial_sums:
        if node.target is aten.add.Tensor and not _is_summand(node, partial_sums):
            _stack_sum(node, partial_sums, order, writer)


def _is_summand(node: fx.Node, partial_sums: Collection[fx.Node]) -> bool:
    """Return whether a sum is only used as a summand of another one."""
    return len(node.users) == 1 and (user := next(iter(node.users))) in partial_sums and user.target is aten.add.Tensor


def _stack_sum(node: fx.Node, partial_sums: Collection[fx.Node], order: Mapping[fx.Node, int], writer: GraphWriter) -> None:
    """Replace a sum of zero-padded rows by stacks of rows; other summands are added as before."""
    todo, other_summands = list(node.args), list[Any]()
    rows: dict[tuple[int, int], dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    padded: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    while todo:
        addend: Any = todo.pop()
        row = _static_row(addend, *addend.args[2:4]) if addend.target is aten.select_backward.default else None
        if row is not None:
            rows[row.dim, row.length][row.step].append(node_argument(addend))
            padded[row.dim, row.length].append(addend)
        elif addend in partial_sums and addend.target is aten.add.Tensor and len(addend.users) == 1:
            todo.extend(addend.args)
        else:
            other_summands.append(addend)
    dim, length = max(rows, key=lambda key: len(rows[key]), default=(0, 0))
    if length < FEWEST_ROWS or 2 * len(rows[dim, length]) < length:
        return
    other_summands += [addend for key, summands in padded.items() if key != (dim, length) for addend in summands]
    most = max(len(summands) for summands in rows[dim, length].values())
    for number in range(most):  # several values for a row come from several loops, in order
        values = [sorted(rows[dim, length].get(step, ()), key=lambda value: order.get(value, 0)) for step in range(length)]
        other_summands.append(
            _stack_rows([row_values[number] if number < len(row_values) else None for row_values in values], dim, node, writer)
        )
    total = other_summands[0]
    for summand in other_summands[1:]:
        total = writer.before(node).call(aten.add.Tensor, total, summand)
    node.replace_all_uses_with(total, propagate_meta=False)
