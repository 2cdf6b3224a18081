"""Write the visible keys of each row as a bias of plain operators: a window, and packed documents.

A bias is added to the scores [b h m n] of m query positions (rows) and n key positions: zero for a visible key, minus
infinity for a hidden one. Packed documents are several sequences, one after the other in one row dimension. Their
cumulative lengths (`cu_seqlens`, the ends of the documents) say where each ends: [0, 3, 5] is one of 3 rows and one of 2.
"""

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
"""(left, right): how many keys before and after its own position a row sees; -1 means all."""


def emit_window_bias(query: fx.Node, size: Any, window: WindowSize, writer: GraphWriter) -> fx.Node:
    """Emit a bias [1 1 m n], with m = n = `size`: zero for keys inside the window, minus infinity for all others.

    The bias gets the dtype and device of `query`.
    """
    rows, keys = (_emit_indices(query, size, writer) for _ in range(2))
    return _emit_bias(_emit_window_conditions(*_emit_broadcast(rows, keys, size, writer), window, writer), query, writer)


def emit_document_bias(
    query: fx.Node, size: Any, window: WindowSize, ends: tuple[fx.Node, fx.Node], writer: GraphWriter
) -> fx.Node:
    """Emit a bias [1 1 m n] that hides keys of other documents and keys outside the window; m = n = `size`.

    `ends` are the cumulative lengths of the documents' rows and of their keys. If both are one value, a document's rows
    and keys have the same indices, and the window is relative to these indices. Otherwise the last row of a document is
    aligned with its last key, and the window is relative to the ends of both.
    """
    call = writer.call
    rows, keys = (_emit_indices(query, size, writer) for _ in range(2))
    row_ends, key_ends = ends
    # with ends [0, 3, 5], rows 0 to 4 get the document indices 1 1 1 2 2
    row_documents = call(aten.bucketize.Tensor, rows, row_ends, right=True)
    key_documents = call(aten.bucketize.Tensor, keys, key_ends, right=True)
    if not _is_same_value(row_ends, key_ends):
        rows = _emit_offset_from_end(rows, row_documents, row_ends, writer)
        keys = _emit_offset_from_end(keys, key_documents, key_ends, writer)
    is_same_document = call(aten.eq.Tensor, *_emit_broadcast(row_documents, key_documents, size, writer))
    window_conditions = _emit_window_conditions(*_emit_broadcast(rows, keys, size, writer), window, writer)
    return _emit_bias([is_same_document, *window_conditions], query, writer)


def _is_same_value(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two values are equal up to copies; values of a graph are never mutated."""
    return before_copies(first) is before_copies(second)


def _emit_indices(query: fx.Node, size: Any, writer: GraphWriter) -> fx.Node:
    """Emit the indices 0, 1, ..., `size` - 1, on the device of `query`."""
    return writer.call(aten.arange.default, size, device=query.meta[VALUE].device)


def _emit_offset_from_end(indices: fx.Node, documents: fx.Node, ends: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit each row's index minus the end of its document: -3 -2 -1 for three rows; keys likewise.

    `documents` has the index into `ends` for each row. Rows after the last document have no entry: their end is 0.
    """
    call = writer.call
    padded = call(aten.constant_pad_nd.default, ends, [0, 1])
    return call(aten.sub.Tensor, indices, call(aten.index.Tensor, padded, [documents]))


def _emit_broadcast(rows: fx.Node, keys: fx.Node, size: Any, writer: GraphWriter) -> tuple[fx.Node, fx.Node]:
    """Reshape a vector over rows to [1 1 m 1], and one over keys to [1 1 1 n]; m = n = `size`."""
    call = writer.call
    return call(aten.reshape.default, rows, [1, 1, size, 1]), call(aten.reshape.default, keys, [1, 1, 1, size])


def _emit_window_conditions(rows: fx.Node, keys: fx.Node, window: WindowSize, writer: GraphWriter) -> list[fx.Node]:
    """Emit the conditions for a visible key: row - left <= key <= row + right. A bound of -1 (all) has no condition.

    `rows` [1 1 m 1] and `keys` [1 1 1 n] are indices. The bounds are added to the m row indices, and not to the distances
    key - row, which have m * n elements.
    """
    (left, right), call = window, writer.call

    def emit_rows_plus(offset: int) -> fx.Node:
        """Emit the row indices plus an offset."""
        return call(aten.add.Tensor, rows, offset) if offset else rows

    after = [call(aten.le.Tensor, keys, emit_rows_plus(right))] if right >= 0 else []
    before = [call(aten.ge.Tensor, keys, emit_rows_plus(-left))] if left >= 0 else []
    return after + before


def _emit_bias(conditions: Sequence[fx.Node], query: fx.Node, writer: GraphWriter) -> fx.Node:
    """Emit a bias with the dtype of `query`: zero where all conditions hold, and minus infinity elsewhere."""
    is_visible = reduce(lambda left, right: writer.call(aten.bitwise_and.Tensor, left, right), conditions)
    like = {"dtype": query.meta[VALUE].dtype, "device": query.meta[VALUE].device}
    zero, hidden = (writer.call(aten.full.default, [], number, **like) for number in (0.0, -math.inf))
    return writer.call(aten.where.self, is_visible, zero, hidden)
