"""Loops that leave a row more than they have steps, and whose rows autograd pads by one.

    stack([a, b, c, d])[:3]            ->  stack([a, b, c])    where a, b, c are made of x[0], x[1], x[2], and d is left over
    slice_backward(g, 0, 3)[1], [3]    ->  g[1], 0             where what is made of them is a stack of 3 rows, not of 4

A loop that writes down its state before each step, and the last one behind all of them, has a row too many: it is cut off where
the states are used. The rows of one loop are told by their number, so that what is cut is written with those alone that are left.
A number says nothing by itself: it has to be that of the rows which these are made of, or which are made of these.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, is_tensor, node_argument, shape_of_node
from streamfx.ir.sizes import Size, shape_of
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.views.tile_views import sliced_rows

aten = torch.ops.aten


def cut_stacks(graph: fx.Graph, reads: Mapping[fx.Node, tuple[fx.Node, int]], writer: GraphWriter) -> None:
    """Stack less, where a stack is cut to as many rows as its own are made of; of single rows `reads` says of which they are one,
    and of how many.
    """
    several = Counter(source for source, _ in reads.values())
    lengths = {node: length for node, (source, length) in reads.items() if several[source] > 1}  # a block's last row is no step
    for node in list(graph.nodes):
        source = node_argument(node) if node.target is aten.slice.Tensor else node
        place = sliced_rows(node, source) if source.target is aten.stack.default and source is not node else None
        if place is None or place[0] != _dimension(source):
            continue
        values: list[fx.Node] = source.args[0]  # type: ignore[assignment]
        kept = values[place[1] : place[2]]
        met = _met(kept, lambda value: value.all_input_nodes, lambda value: lengths.get(value, 0), {len(kept), len(values)})
        if len(kept) in met and len(values) not in met:
            node.replace_all_uses_with(writer.before(node).call(aten.stack.default, kept, place[0]), propagate_meta=False)


def cut_rows(reads: Iterable[fx.Node], writer: GraphWriter) -> None:
    """Read rows of what was padded, or zeros, where as many rows are made of them as there were before it was padded."""
    padded: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for read in reads:
        if read.target is aten.select.int and node_argument(read).target in (aten.slice_backward.default, aten.add.Tensor):
            padded[node_argument(read)].append(read)
    for source, own in padded.items():
        dim, length = _dimension(own[0]), shape_of_node(source)[_dimension(own[0])]
        parts = _paddings(source, dim)
        if not parts or any(_dimension(read) != dim for read in own):
            continue
        counts = {length, *(part.stop - part.start for part in parts.values())}
        met = _met(own, lambda value: list(value.users), _stacked_rows, counts)
        if length not in met and any(part.stop - part.start in met for part in parts.values()):
            for read in own:
                row = int_argument(read, 2) % int(length)  # type: ignore[call-overload]
                read.replace_all_uses_with(_row(read, row, parts, writer.before(read)), propagate_meta=False)


def _paddings(source: fx.Node, dim: int) -> dict[fx.Node, range]:
    """What a value is the sum of, each padded along a dimension to its shape, no two in the same rows; and in which rows each is.
    Nothing where it is something else.
    """
    found, todo = dict[fx.Node, range](), [source]
    while todo:
        part = todo.pop()
        if is_plain_sum(part):
            todo.extend(part.args)  # type: ignore[arg-type]
            continue
        place = sliced_rows(part, part) if part.target is aten.slice_backward.default else None
        if place is None or place[0] != dim or any(place[1] < rows.stop and rows.start < place[2] for rows in found.values()):
            return {}  # x + x among them, whose rows are in two places
        found[part] = range(place[1], place[2])
    return found


def is_plain_sum(node: fx.Node) -> bool:
    """Whether two numbers of one kind are added up, and nothing is repeated or converted for that."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    values = [item.meta[VALUE] for item in (*node.args, node) if is_tensor(item)]  # type: ignore[union-attr]
    return len(values) == 3 and len({(shape_of(value), value.dtype) for value in values}) == 1


def _met(
    start: Iterable[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]],
    rows: Callable[[fx.Node], int],
    numbers: Container[Size],
) -> set[int]:
    """Those of some numbers of rows that the first values have, or are taken from, on all ways from here."""
    todo, seen, found = list(start), set[fx.Node](), set[int]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if (count := rows(node)) in numbers:
            found.add(count)
        else:
            todo.extend(following(node))
    return found


def _stacked_rows(node: fx.Node) -> int:
    return len(node.args[0]) if node.target is aten.stack.default else 0  # type: ignore[arg-type]


def _dimension(node: fx.Node) -> int:
    """The dimension along which rows are stacked, or one is taken."""
    of = node if node.target is aten.stack.default else node_argument(node)
    return int(bound_arguments(node)["dim"]) % len(shape_of_node(of))


def _row(read: fx.Node, row: int, parts: Mapping[fx.Node, range], writer: GraphWriter) -> fx.Node:
    """A row of a sum of padded values: of the one that has it, and zeros of the others, which make 0 of -0."""
    own = read.meta[VALUE]
    for part, rows in parts.items():
        if row in rows:
            found = writer.call(aten.select.int, node_argument(part), _dimension(read), row - rows.start)
            return found if len(parts) == 1 else writer.call(aten.add.Tensor, found, 0.0)
    return writer.call(aten.full.default, list(own.shape), 0, dtype=own.dtype, device=own.device)
