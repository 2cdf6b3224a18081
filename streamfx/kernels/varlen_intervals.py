"""Find the rows of a mask that are consecutive documents, from the intervals of keys that rows see.

The keys of a document follow the keys of the document before it. Its rows see all of its keys; or its last row sees
all of them and each row before it one fewer; or, with a window, at most the window's length of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamfx.kernels.plain_attention import Varlen


class RowInterval(NamedTuple):
    """The keys [first, stop) outside which a row sees nothing; `solid` if it sees all keys inside, with nothing added."""

    first: int
    stop: int
    solid: bool


class DocumentInterval(NamedTuple):
    """Rows [first, stop) and the keys [first, stop) of their documents."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    documents: Varlen


def documents_in(rows: Sequence[RowInterval], least: int) -> Iterator[DocumentInterval]:
    """Yield the intervals of several documents, or of a window, in order: each has at least `least` rows, or all rows."""
    start = 0
    while start < len(rows):
        longest = max((_longest(rows, start, causal) for causal in (True, False)), key=lambda item: item.rows[1])
        stop, documents = longest.rows[1], longest.documents
        is_long = stop - start >= least or stop - start == len(rows)
        if rows[start].solid and is_long and (len(documents.rows) > 2 or documents.left is not None):
            yield longest
        start = stop


def _longest(rows: Sequence[RowInterval], start: int, causal: bool) -> DocumentInterval:
    """Return the longest interval of documents of one kind from `start` on.

    It has a window if each of some consecutive rows drops one key.
    """
    starts, width, index = [start], None, start + 1
    longest = rows[start].stop - rows[start].first
    while index < len(rows) and rows[index - 1].solid and rows[index].solid:
        previous, current = rows[index - 1], rows[index]
        length, is_next = current.stop - current.first, current.first == previous.stop
        slides = causal and not is_next and (current.first, current.stop) == (previous.first + 1, previous.stop + 1)
        continues = current.first == previous.first and current.stop == previous.stop + causal
        shown = width if not slides else length if width is None else min(width, length)
        if not (is_next or slides or continues) or (shown is not None and max(longest, length) > shown):
            break
        width, longest = shown, max(longest, length)
        starts += [index] * is_next
        index += 1
    return _interval(rows, [*starts, index], causal, None if width is None else width - 1)


def _interval(rows: Sequence[RowInterval], ends: Sequence[int], causal: bool, left: int | None) -> DocumentInterval:
    """Return consecutive documents whose rows begin at all but the last of `ends`, with their keys."""
    first, stop = rows[ends[0]].first, rows[ends[-1] - 1].stop
    keys = (*(rows[end].first - first for end in ends[:-1]), stop - first)
    documents = Varlen(tuple(end - ends[0] for end in ends), keys, causal, left)
    return DocumentInterval((ends[0], ends[-1]), (first, stop), documents)
