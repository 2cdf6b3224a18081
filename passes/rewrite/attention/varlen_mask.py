"""What rows see of their keys, as a bias of plain operators: a window, and documents that lie one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import node_argument
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE

aten = torch.ops.aten

COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)

Seen: TypeAlias = "tuple[int, int]"
"""How many keys before a row and after it are seen; -1 is all."""


def bias(query: fx.Node, size: Any, seen: Seen, writer: GraphWriter) -> fx.Node:
    """Zero for keys of the window, minus infinity for others: [1 1 m n] for as many keys as rows."""
    rows, keys = (_numbers(query, size, writer) for _ in range(2))
    return _added(_window(*_facing(rows, keys, size, writer), seen, writer), query, writer)


def in_documents(query: fx.Node, size: Any, seen: Seen, ends: tuple[fx.Node, fx.Node], writer: GraphWriter) -> fx.Node:
    """The same for keys of the row's own document: the one that begins at `ends[i]`, for rows and for keys.

    Where both are one value, a document's rows stand where its keys do, and the window is one of all rows. Else it is counted
    from the end of the document's rows and of its keys.
    """
    call = writer.call
    rows, keys = (_numbers(query, size, writer) for _ in range(2))
    of_row, of_key = (call(aten.bucketize.Tensor, place, own, right=True) for place, own in zip((rows, keys), ends, strict=True))
    if not _are_one_value(*ends):
        rows, keys = _before_the_end(rows, of_row, ends[0], writer), _before_the_end(keys, of_key, ends[1], writer)
    are_same = call(aten.eq.Tensor, *_facing(of_row, of_key, size, writer))
    return _added([are_same, *_window(*_facing(rows, keys, size, writer), seen, writer)], query, writer)


def _are_one_value(first: fx.Node, second: fx.Node) -> bool:
    """Whether one is the other, or a copy of it: nothing writes into a value of a graph."""
    return _copied(first) is _copied(second)


def _copied(node: fx.Node) -> fx.Node:
    while node.target in COPIES:
        node = node_argument(node)
    return node


def _numbers(query: fx.Node, size: Any, writer: GraphWriter) -> fx.Node:
    return writer.call(aten.arange.default, size, device=query.meta[VALUE].device)


def _before_the_end(places: fx.Node, documents: fx.Node, ends: fx.Node, writer: GraphWriter) -> fx.Node:
    """Minus how many rows are left of a row's document; rows behind the last document are said to be in one that ends at 0."""
    call = writer.call
    padded = call(aten.constant_pad_nd.default, ends, [0, 1])
    return call(aten.sub.Tensor, places, call(aten.index.Tensor, padded, [documents]))


def _facing(rows: fx.Node, keys: fx.Node, size: Any, writer: GraphWriter) -> tuple[fx.Node, fx.Node]:
    """What is known of rows [1 1 m 1] and of keys [1 1 1 n]."""
    call = writer.call
    return call(aten.reshape.default, rows, [1, 1, size, 1]), call(aten.reshape.default, keys, [1, 1, 1, size])


def _window(rows: fx.Node, keys: fx.Node, seen: Seen, writer: GraphWriter) -> list[fx.Node]:
    """What has to hold for a key to be seen. Rows are moved, and not their distances to keys, of which there are many more."""
    (left, right), call = seen, writer.call

    def moved(by: int) -> fx.Node:
        return call(aten.add.Tensor, rows, by) if by else rows

    after = [call(aten.le.Tensor, keys, moved(right))] if right >= 0 else []
    before = [call(aten.ge.Tensor, keys, moved(-left))] if left >= 0 else []
    return after + before


def _added(conditions: Sequence[fx.Node], query: fx.Node, writer: GraphWriter) -> fx.Node:
    """Zero where all conditions hold, minus infinity elsewhere."""
    shown = reduce(lambda one, other: writer.call(aten.bitwise_and.Tensor, one, other), conditions)
    like = {"dtype": query.meta[VALUE].dtype, "device": query.meta[VALUE].device}
    zero, hidden = (writer.call(aten.full.default, [], number, **like) for number in (0.0, -math.inf))
    return writer.call(aten.where.self, shown, zero, hidden)
