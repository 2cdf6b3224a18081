"""Write the visible keys of each row as a bias of plain operators: a window, and packed documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import before_copies

aten = torch.ops.aten


WindowSize: TypeAlias = "tuple[int, int]"
"""How many keys before and after a row it sees; -1 means all."""


def emit_window_bias(query: fx.Node, size: Any, window: WindowSize, writer: GraphWriter) -> fx.Node:
    """Return a bias [1 1 m n], with m = n: zero for keys inside the window, minus infinity for all others."""
    rows, keys = (_emit_indices(query, size, writer) for _ in range(2))
    return _emit_bias(_emit_window_conditions(*_broadcast(rows, keys, size, writer), window, writer), query, writer)


def emit_document_bias(
    query: fx.Node, size: Any, window: WindowSize, ends: tuple[fx.Node, fx.Node], writer: GraphWriter
) -> fx.Node:
    """Return a bias that also hides keys of other documents; `ends` are the cumulative lengths, for rows and for keys.

    If both ends are one value, a document's rows and keys have the same indices, and the window is relative to these
    indices. Otherwise the window is relative to the ends of the document's rows and keys.
    """
    call = writer.call
    rows, keys = (_emit_indices(query, size, writer) for _ in range(2))
    of_row, of_key = (
        call(aten.bucketize.Tensor, indices, document_ends, right=True)
        for indices, document_ends in zip((rows, keys), ends, strict=True)
    )
    if not _is_same_value(*ends):
        rows, keys = _offset_from_end(rows, of_row, ends[0], writer), _offset_from_end(keys, of_key, ends[1], writer)
    is_same_document = call(aten.eq.Tensor, *_broadcast(of_row, of_key, size, writer))
    return _emit_bias(
        [is_same_document, *_emit_window_conditions(*_broadcast(rows, keys, size, writer), window, writer)], query, writer
    )


def _is_same_value(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two values are equal up to copies; values of a graph are never mutated."""
    return before_copies(first) is before_copies(second)


def _emit_indices(query: fx.Node, size: Any, writer: GraphWriter) -> fx.Node:
    """Emit the indices 0, 1, 2, ... up to `size`."""
    return writer.call(aten.arange.default, size, device=query.meta[VALUE].device)


def _offset_from_end(indices: fx.Node, documents: fx.Node, ends: fx.Node, writer: GraphWriter) -> fx.Node:
    """Return minus the number of rows left in each row's document. Rows after the last document get a document with end 0."""
    call = writer.call
    padded = call(aten.constant_pad_nd.default, ends, [0, 1])
    return call(aten.sub.Tensor, indices, call(aten.index.Tensor, padded, [documents]))


def _broadcast(rows: fx.Node, keys: fx.Node, size: Any, writer: GraphWriter) -> tuple[fx.Node, fx.Node]:
    """Reshape values of rows to [1 1 m 1], and values of keys to [1 1 1 n]."""
    call = writer.call
    return call(aten.reshape.default, rows, [1, 1, size, 1]), call(aten.reshape.default, keys, [1, 1, 1, size])


def _emit_window_conditions(rows: fx.Node, keys: fx.Node, window: WindowSize, writer: GraphWriter) -> list[fx.Node]:
    """Return the conditions for a visible key.

    The bounds are added to row indices and not to distances, because distances have m * n elements.
    """
    (left, right), call = window, writer.call

    def rows_plus(offset: int) -> fx.Node:
        """Emit the row indices plus an offset."""
        return call(aten.add.Tensor, rows, offset) if offset else rows

    after = [call(aten.le.Tensor, keys, rows_plus(right))] if right >= 0 else []
    before = [call(aten.ge.Tensor, keys, rows_plus(-left))] if left >= 0 else []
    return after + before


def _emit_bias(conditions: Sequence[fx.Node], query: fx.Node, writer: GraphWriter) -> fx.Node:
    """Return zero if all conditions hold, and minus infinity elsewhere."""
    is_visible = reduce(lambda left, right: writer.call(aten.bitwise_and.Tensor, left, right), conditions)
    like = {"dtype": query.meta[VALUE].dtype, "device": query.meta[VALUE].device}
    zero, hidden = (writer.call(aten.full.default, [], number, **like) for number in (0.0, -math.inf))
    return writer.call(aten.where.self, is_visible, zero, hidden)
