"""Find the rows of a mask that are consecutive documents, from the intervals of keys that rows (queries) see.

The keys of a document follow the keys of the document before it. Either all its rows see all its keys; or the mask is
causal, so that its last row sees all keys and each row before it one fewer; or it is causal with a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamfx.kernels.attention_call import Varlen


class RowInterval(NamedTuple):
    """The keys [first, stop) outside which a row sees nothing; `sees_all`: it sees all keys inside, with nothing added."""

    first: int
    stop: int
    sees_all: bool


class DocumentInterval(NamedTuple):
    """Rows (first, stop) that are consecutive documents, the keys (first, stop) of these, and the ends of each (`Varlen`)."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    documents: Varlen


def documents_in(rows: Sequence[RowInterval], min_rows: int) -> Iterator[DocumentInterval]:
    """Yield, in order, the ranges of rows that contain several documents, or one document with a window.

    `rows`: the visible keys of each row. Each range has at least `min_rows` rows, or all rows.
    """
    start = 0
    while start < len(rows):
        causal, full = _longest(rows, start, causal=True), _longest(rows, start, causal=False)
        longest = causal if causal.rows[1] >= full.rows[1] else full
        stop, documents = longest.rows[1], longest.documents
        is_long = stop - start >= min_rows or stop - start == len(rows)
        num_documents = len(documents.rows) - 1  # `Varlen.rows` has the start of the first document and the end of each
        if rows[start].sees_all and is_long and (num_documents > 1 or documents.left is not None):
            yield longest
        start = stop


def _longest(rows: Sequence[RowInterval], start: int, causal: bool) -> DocumentInterval:
    """Return the longest range of documents that starts at row `start`: all documents are causal, or (not `causal`) none is.

    A row begins a document (`is_next`) if its keys begin where the keys of the row before it end. It continues a document if
    it sees the same keys, or, causally, one more. It slides if both ends move by one key: then causal documents have a window
    of `width` keys, as many as a sliding row sees, and no row may see more.
    """
    starts, width, index = [start], None, start + 1
    max_length = rows[start].stop - rows[start].first
    while index < len(rows) and rows[index - 1].sees_all and rows[index].sees_all:
        previous, current = rows[index - 1], rows[index]
        length, is_next = current.stop - current.first, current.first == previous.stop
        slides = causal and not is_next and (current.first, current.stop) == (previous.first + 1, previous.stop + 1)
        continues = current.first == previous.first and current.stop == previous.stop + causal
        max_visible = width if not slides else length if width is None else min(width, length)
        if not (is_next or slides or continues) or (max_visible is not None and max(max_length, length) > max_visible):
            break
        width, max_length = max_visible, max(max_length, length)
        starts += [index] * is_next
        index += 1
    return _interval(rows, [*starts, index], causal, None if width is None else width - 1)


def _interval(rows: Sequence[RowInterval], ends: Sequence[int], causal: bool, left: int | None) -> DocumentInterval:
    """Return the range of consecutive documents: document i has the rows from `ends[i]` to `ends[i + 1]`.

    `left`: a row sees at most this many keys before its own; None: no window.
    """
    first, stop = rows[ends[0]].first, rows[ends[-1] - 1].stop
    keys = (*(rows[end].first - first for end in ends[:-1]), stop - first)
    documents = Varlen(tuple(end - ends[0] for end in ends), keys, causal, left)
    return DocumentInterval((ends[0], ends[-1]), (first, stop), documents)
