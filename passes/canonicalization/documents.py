"""What rows see of their keys, as a bias of plain operators: a window, and documents that lie one after the other."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import node_argument
from streamfx.ir.writer import GraphWriter

aten = torch.ops.aten

COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)

Seen: TypeAlias = "tuple[int, int]"
"""How many keys before a row and after it are seen; -1 is all."""


def bias(query: fx.Node, size: Any, seen: Seen, writer: GraphWriter) -> fx.Node:
    """Zero for keys of the window, minus infinity for others: [1 1 m n] for as many keys as rows."""
    rows, keys = (_numbers(query, size, writer) for _ in range(2))
    return _windowed(rows, keys, size, seen, query, writer)


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
    shown = _windowed(rows, keys, size, seen, query, writer)
    are_same = call(aten.eq.Tensor, *_facing(of_row, of_key, size, writer))
    return call(aten.where.self, are_same, shown, _number(-math.inf, query, writer))


def _are_one_value(first: fx.Node, second: fx.Node) -> bool:
    """Whether one is the other, or a copy of it: nothing writes into a value of a graph."""
    return _copied(first) is _copied(second)


def _copied(node: fx.Node) -> fx.Node:
    while node.target in COPIES:
        node = node_argument(node)
    return node


def _numbers(query: fx.Node, size: Any, writer: GraphWriter) -> fx.Node:
    return writer.call(aten.arange.default, size, device=query.meta["val"].device)


def _before_the_end(places: fx.Node, documents: fx.Node, ends: fx.Node, writer: GraphWriter) -> fx.Node:
    """Minus how many rows are left of a row's document; rows behind the last document are said to be in one that ends at 0."""
    call = writer.call
    padded = call(aten.constant_pad_nd.default, ends, [0, 1])
    return call(aten.sub.Tensor, places, call(aten.index.Tensor, padded, [documents]))


def _windowed(rows: fx.Node, keys: fx.Node, size: Any, seen: Seen, query: fx.Node, writer: GraphWriter) -> fx.Node:
    call, (left, right) = writer.call, seen
    shown, hidden = (_number(number, query, writer) for number in (0.0, -math.inf))
    bounds = [(aten.le.Scalar, right)] if right >= 0 else []
    bounds += [(aten.ge.Scalar, -left)] if left >= 0 else []
    if not bounds:
        return shown
    facing = _facing(rows, keys, size, writer)
    delta, mask = call(aten.sub.Tensor, facing[1], facing[0]), shown
    for compare, bound in bounds:
        mask = call(aten.where.self, call(compare, delta, bound), mask, hidden)
    return mask


def _facing(rows: fx.Node, keys: fx.Node, size: Any, writer: GraphWriter) -> tuple[fx.Node, fx.Node]:
    """What is known of rows [1 1 m 1] and of keys [1 1 1 n]."""
    call = writer.call
    return call(aten.reshape.default, rows, [1, 1, size, 1]), call(aten.reshape.default, keys, [1, 1, 1, size])


def _number(value: float, query: fx.Node, writer: GraphWriter) -> fx.Node:
    own = query.meta["val"]
    return writer.call(aten.full.default, [], value, dtype=own.dtype, device=own.device)
