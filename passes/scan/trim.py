"""Trim the results of loops that return one row more than they have steps, and gradients that autograd pads by one row.

    stack([a, b, c, d])[:3]            ->  stack([a, b, c])    if a, b, c depend on x[0], x[1], x[2], and d is left over
    slice_backward(g, 0, 3)[1], [3]    ->  g[1], 0             if their results are stacked to 3 rows, not to 4

A loop that stores its state before each step, and after the last one, stacks one row more than it reads, and its uses slice
the extra row off. Unrolled loops are identified by their number of rows, so the slice becomes a stack of the remaining rows.
An equal number alone is not sufficient: the stacked rows must be computed from a value with this number of rows (forward), or
be used for one (backward).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, node_argument, shape_of_node, walk
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter
from streamfx.passes.ops.row_maps import RowMove, RowSlice, find_sources, is_same_type_addition, nested_addends, row_read
from streamfx.passes.rewrite.views.scatter_to_concat import emit_piece

aten = torch.ops.aten


def trim_stacks(graph: fx.Graph, reads: Mapping[fx.Node, tuple[fx.Node, int]], writer: GraphWriter) -> None:
    """stack([a, b, c, d])[:3] -> stack([a, b, c]), in place, if a, b, c are computed from rows of a value with 3 rows.

    `reads` maps each selected row (x[:, t]) to the value that it is selected from (x), and that value's number of rows. The
    slice remains if some of the rows are computed from a value with 4 rows.
    """
    reads_per_source = Counter(source for source, _ in reads.values())
    # a single selected row, such as the last row of a block, is not a step
    lengths = {node: length for node, (source, length) in reads.items() if reads_per_source[source] > 1}
    for node in list(graph.nodes):
        read = row_read(node)
        stacks = nested_addends(read.tensor) if read is not None and not read.is_single and read.rows.is_static else []
        if read is None or not stacks or not all(_is_stack_along(stack, read.rows.dim) for stack in stacks):
            continue
        rows = [list(stack.args[0])[read.rows.start : read.rows.stop] for stack in stacks]  # type: ignore[arg-type]
        length, num_kept = shape_of_node(read.tensor)[read.rows.dim], len(rows[0])
        counts = _first_matching_counts(
            [value for kept in rows for value in kept],
            lambda value: value.all_input_nodes,
            lambda value: lengths.get(value, 0),
            {num_kept, length},
        )
        if num_kept in counts and length not in counts:
            writer.move_before(node)
            trimmed = [writer.call(aten.stack.default, kept, read.rows.dim) for kept in rows]
            node.replace_all_uses_with(reduce(partial(writer.call, aten.add.Tensor), trimmed), propagate_meta=False)


def _is_stack_along(node: fx.Node, dim: int) -> bool:
    """Return whether a node stacks rows along dimension `dim`."""
    return node.target is aten.stack.default and _row_dim(node) == dim


def trim_rows(reads: Iterable[fx.Node], writer: GraphWriter) -> None:
    """slice_backward(g, 0, 3)[1] -> g[1], and [3] -> 0, in place, if results computed from these rows are stacked to 3 rows.

    `reads`: the nodes that select a row of a value. The value may be a zero-padded gradient, a sum of several, or any other value
    that consists of rows of values with another number of rows, such as cat([first, x]).
    """
    moves_of: dict[tuple[fx.Node, int], list[RowMove]] = defaultdict(list)
    for move in filter(None, map(row_read, reads)):
        moves_of[move.tensor, move.rows.dim].append(move)
    for (source, dim), moves in moves_of.items():
        length: Any = shape_of_node(source)[dim]
        pieces = find_sources(source, RowSlice(dim, 0, length))
        values = [piece.value for piece in pieces if isinstance(piece.value, fx.Node) and not piece.is_row]
        lengths = {shape_of_node(value)[dim] for value in values if value is not source}
        if not lengths:
            continue
        counts = _first_matching_counts(
            [move.part for move in moves], lambda value: list(value.users), _stacked_rows, {length, *lengths}
        )
        if length not in counts and lengths & counts:
            for move in moves:
                (piece,) = (part for piece in pieces if (part := piece.clip(*move.rows[1:])).num_rows > 0)
                row = emit_piece(piece, move, writer.move_before(move.part))
                if row is not None:
                    move.part.replace_all_uses_with(row, propagate_meta=False)


def _first_matching_counts(
    start: Iterable[fx.Node],
    next_nodes: Callable[[fx.Node], Iterable[fx.Node]],
    rows: Callable[[fx.Node], int],
    counts_to_find: Container[Size],
) -> set[int]:
    """Follow all paths from the start nodes, each up to the first node whose number of rows is in `counts_to_find`.

    Return these numbers. `next_nodes` returns the inputs, or the users, of a node; `rows` its number of rows, or 0.
    """
    nodes = walk(start, lambda node: () if rows(node) in counts_to_find else next_nodes(node))
    return {count for count in map(rows, nodes) if count in counts_to_find}


def _stacked_rows(node: fx.Node) -> int:
    """Return the number of rows of a stack, or of a slice if only slices use it, also after additions; 0 for other operators."""
    if node.target is not aten.stack.default:
        return 0
    sums = list(walk([node], lambda value: filter(is_same_type_addition, value.users)))
    reads = [row_read(user) for value in sums for user in value.users if user not in sums]
    lengths = [read.rows.stop - read.rows.start for read in reads if read is not None and read.rows.dim == _row_dim(node)]
    return max(lengths) if 0 < len(lengths) == len(reads) else len(node.args[0])  # type: ignore[arg-type]


def _row_dim(node: fx.Node) -> int:
    """Return the dimension (from the start) along which a `stack` adds rows, or a `select` selects one."""
    value = node if node.target is aten.stack.default else node_argument(node)
    return int(bound_arguments(node)["dim"]) % len(shape_of_node(value))
