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

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, node_argument, shape_of_node, walk
from streamfx.ir.sizes import Size
from streamfx.ir.writer import GraphWriter
from streamfx.passes.ops.row_maps import RowSlice, find_pieces, row_read
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
        if read is None or read.tensor.target is not aten.stack.default or read.is_single:
            continue
        if read.rows.dim != _row_dim(read.tensor):
            continue
        values: list[fx.Node] = read.tensor.args[0]  # type: ignore[assignment]
        kept = values[read.rows.start : read.rows.stop]
        counts = _first_matching_counts(
            kept, lambda value: value.all_input_nodes, lambda value: lengths.get(value, 0), {len(kept), len(values)}
        )
        if len(kept) in counts and len(values) not in counts:
            node.replace_all_uses_with(
                writer.move_before(node).call(aten.stack.default, kept, read.rows.dim), propagate_meta=False
            )


def trim_rows(reads: Iterable[fx.Node], writer: GraphWriter) -> None:
    """slice_backward(g, 0, 3)[1] -> g[1], and [3] -> 0, in place, if results computed from these rows are stacked to 3 rows.

    `reads`: the nodes that select a row of a value. The value is a zero-padded gradient, or a sum of several without overlap;
    each is padded by the extra row of the loop.
    """
    padded: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for read in reads:
        if read.target is aten.select.int and node_argument(read).target in (aten.slice_backward.default, aten.add.Tensor):
            padded[node_argument(read)].append(read)
    for source, selects in padded.items():
        moves = [move for read in selects if (move := row_read(read)) is not None and move.rows.dim == _row_dim(selects[0])]
        length = shape_of_node(source)[_row_dim(selects[0])]
        if not isinstance(length, int) or len(moves) < len(selects):
            continue
        dim = moves[0].rows.dim
        pieces = find_pieces(source, RowSlice(dim, 0, length))
        unpadded_lengths = {piece.num_rows for piece in pieces if piece.has_all_rows(dim)}
        stacked_lengths = _first_matching_counts(
            selects, lambda value: list(value.users), _stacked_rows, {length, *unpadded_lengths}
        )
        if length not in stacked_lengths and unpadded_lengths & stacked_lengths:
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
    """Return the number of values that a stack joins; 0 for other operators."""
    return len(node.args[0]) if node.target is aten.stack.default else 0  # type: ignore[arg-type]


def _row_dim(node: fx.Node) -> int:
    """Return the dimension (from the start) along which a `stack` adds rows, or a `select` selects one."""
    value = node if node.target is aten.stack.default else node_argument(node)
    return int(bound_arguments(node)["dim"]) % len(shape_of_node(value))
