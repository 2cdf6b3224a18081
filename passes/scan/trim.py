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

from streamfx.ir.joint import bound_arguments, int_argument, is_tensor, node_argument, shape_of_node, walk
from streamfx.ir.sizes import Size, shape_of
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.views.tile_views import sliced_rows

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
        source = node_argument(node) if node.target is aten.slice.Tensor else node
        rows_range = sliced_rows(node, source) if source.target is aten.stack.default and source is not node else None
        if rows_range is None or rows_range.dim != _row_dim(source):
            continue
        values: list[fx.Node] = source.args[0]  # type: ignore[assignment]
        kept = values[rows_range.start : rows_range.stop]
        counts = _first_matching_counts(
            kept, lambda value: value.all_input_nodes, lambda value: lengths.get(value, 0), {len(kept), len(values)}
        )
        if len(kept) in counts and len(values) not in counts:
            node.replace_all_uses_with(
                writer.move_before(node).call(aten.stack.default, kept, rows_range.dim), propagate_meta=False
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
        dim = _row_dim(selects[0])
        length = shape_of_node(source)[dim]
        summands = _padded_summands(source, dim)
        if not summands or any(_row_dim(read) != dim for read in selects):
            continue
        unpadded_lengths = {rows.stop - rows.start for rows in summands.values()}
        stacked_lengths = _first_matching_counts(
            selects, lambda value: list(value.users), _stacked_rows, {length, *unpadded_lengths}
        )
        if length not in stacked_lengths and unpadded_lengths & stacked_lengths:
            for read in selects:
                row = int_argument(read, 2) % int(length)  # type: ignore[call-overload]
                read.replace_all_uses_with(
                    _select_padded_row(read, row, summands, writer.move_before(read)), propagate_meta=False
                )


def _padded_summands(source: fx.Node, dim: int) -> dict[fx.Node, range]:
    """Return the `slice_backward` summands of a value, each with the rows [start, stop) along `dim` that are not padding.

    Return an empty dictionary if a summand is not such a zero-padded value, or if the rows of two overlap.
    """
    summands, todo = dict[fx.Node, range](), [source]
    while todo:
        addend = todo.pop()
        if is_same_type_addition(addend):
            todo.extend(addend.args)  # type: ignore[arg-type]
            continue
        rows_range = sliced_rows(addend, addend) if addend.target is aten.slice_backward.default else None
        if (
            rows_range is None
            or rows_range.dim != dim
            or any(rows_range.start < rows.stop and rows.start < rows_range.stop for rows in summands.values())
        ):
            return {}  # including x + x, which has its rows twice
        summands[addend] = range(rows_range.start, rows_range.stop)
    return summands


def is_same_type_addition(node: fx.Node) -> bool:
    """Return whether two tensors of equal shape and dtype are added, without broadcasting, conversion or scaling."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    values = [item.meta[VALUE] for item in (*node.args, node) if is_tensor(item)]  # type: ignore[union-attr]
    return len(values) == 3 and len({(shape_of(value), value.dtype) for value in values}) == 1


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


def _select_padded_row(read: fx.Node, row: int, summands: Mapping[fx.Node, range], writer: GraphWriter) -> fx.Node:
    """Emit row number `row` of a sum of zero-padded values: the row of the summand that has it, or zeros if none does.

    `summands` maps each `slice_backward` to its rows. With several summands, add 0: the original sum also turns -0 into 0.
    """
    like = read.meta[VALUE]
    for summand, rows in summands.items():
        if row in rows:
            selected = writer.call(aten.select.int, node_argument(summand), _row_dim(read), row - rows.start)
            return selected if len(summands) == 1 else writer.call(aten.add.Tensor, selected, 0.0)
    return writer.call(aten.full.default, list(like.shape), 0, dtype=like.dtype, device=like.device)
