"""Which rows of a mask are documents that lie one after the other? Read off the intervals of keys that rows see.

The keys of a document follow those of the document before it. Its rows see all of them; or its last row sees all, and each row
before it one less; or no more than a window's length of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamfx.kernels.plain_attention import Varlen


class RowInterval(NamedTuple):
    """The keys [first, stop) outside of which a row sees nothing; `solid` if it sees all of them, with nothing added."""

    first: int
    stop: int
    solid: bool


class DocumentInterval(NamedTuple):
    """Rows [first, stop) and the keys [first, stop) of their documents."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    documents: Varlen


def documents_in(rows: Sequence[RowInterval], least: int) -> Iterator[DocumentInterval]:
    """Stretches of several documents, or of a window, in order: of so many rows at least, or of all that there are."""
    start = 0
    while start < len(rows):
        found = max((_longest(rows, start, causal) for causal in (True, False)), key=lambda item: item.rows[1])
        stop, seen = found.rows[1], found.documents
        is_long = stop - start >= least or stop - start == len(rows)
        if rows[start].solid and is_long and (len(seen.rows) > 2 or seen.left is not None):
            yield found
        start = stop


def _longest(rows: Sequence[RowInterval], start: int, causal: bool) -> DocumentInterval:
    """The most rows from one on that are documents of a kind, with a window if rows that follow one another lose a key each."""
    begins, width, at = [start], None, start + 1
    longest = rows[start].stop - rows[start].first
    while at < len(rows) and rows[at - 1].solid and rows[at].solid:
        before, own = rows[at - 1], rows[at]
        length, is_next = own.stop - own.first, own.first == before.stop
        slides = causal and not is_next and (own.first, own.stop) == (before.first + 1, before.stop + 1)
        goes_on = own.first == before.first and own.stop == before.stop + causal
        shown = width if not slides else length if width is None else min(width, length)
        if not (is_next or slides or goes_on) or (shown is not None and max(longest, length) > shown):
            break
        width, longest = shown, max(longest, length)
        begins += [at] * is_next
        at += 1
    return _stretch(rows, [*begins, at], causal, None if width is None else width - 1)


def _stretch(rows: Sequence[RowInterval], ends: Sequence[int], causal: bool, left: int | None) -> DocumentInterval:
    first, stop = rows[ends[0]].first, rows[ends[-1] - 1].stop
    keys = (*(rows[end].first - first for end in ends[:-1]), stop - first)
    documents = Varlen(tuple(end - ends[0] for end in ends), keys, causal, left)
    return DocumentInterval((ends[0], ends[-1]), (first, stop), documents)
