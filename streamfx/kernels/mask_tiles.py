"""Decompose a mask, row by row, into a few tiles, most of which need no mask.

A row is a query, and a tile a range of rows with the range of keys that they see. The mask [b m n] (batch, rows, keys) is
added to scores: 0 shows a key, minus infinity hides it. With padding and packed documents each row sees an interval of
keys. Consecutive rows with the same interval are a full tile. If their intervals start at the same key and grow by one
key per row, they are a causal tile. Other rows keep their mask, limited to the keys that it shows. If a kernel takes many
documents in one call, consecutive documents form one tile (see `varlen_intervals.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from streamfx.ir.ranges import HIDDEN_SCORE, HIDDEN_SCORE_HALF, INFINITY, MIN_VISIBLE_MASK_HALF, VISIBLE_SCORE
from streamfx.kernels.attention_call import Varlen
from streamfx.kernels.varlen_intervals import RowInterval, documents_in

MIN_TILE_ROWS = 16  # adjacent tiles with fewer rows become one call with a mask, because a kernel launch takes longer than a tile


class Thresholds(NamedTuple):
    """Mask values from `min_visible` on surely show a key, values up to `max_hiding` hide it; each is added to a score."""

    min_visible: float
    max_hiding: float


INFINITE = Thresholds(-INFINITY, -INFINITY)  # only minus infinity hides a key
FINITE = Thresholds(VISIBLE_SCORE, HIDDEN_SCORE)  # for dtypes with the range of float32
FINITE_HALF = Thresholds(MIN_VISIBLE_MASK_HALF, HIDDEN_SCORE_HALF)  # for float16


class TileKind(Enum):
    FULL = "full"  # each row sees all keys
    CAUSAL = "causal"  # the last row sees all keys, each row before it one key fewer
    PACKED = "packed"  # rows see the keys of their documents
    MIXED = "mixed"  # rows see the keys that the mask shows


@dataclass(frozen=True)
class MaskTile:
    """Three ranges (first, stop): rows (queries), the keys that they see, and the batch items for which this holds."""

    kind: TileKind
    rows: tuple[int, int]
    keys: tuple[int, int]
    batch: tuple[int, int] = (0, 1)
    documents: Varlen | None = None  # counted from the first row and key of the tile

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class VisibleIntervals:
    """The visible keys of each row of a mask, as integers [b m 3] on the host: (first, stop, sees all), see `RowInterval`.

    `num_keys` is the mask's number of keys. If the mask is broadcast along rows or keys, m or `num_keys` is 1.
    """

    values: Tensor
    num_keys: int


def tiles_of_mask(
    mask: Tensor, batch_size: int, finite_hides: bool = True, packs_documents: bool = False
) -> tuple[MaskTile, ...]:
    """Return the tiles of a mask [b m n] that is added to the scores of all heads; b is `batch_size` or 1.

    `finite_hides`: large negative values hide a key as minus infinity does. `packs_documents`: consecutive documents form
    one tile.
    """
    _, num_rows, num_keys = mask.shape
    intervals = VisibleIntervals(visible_intervals(mask, finite_hides), num_keys)
    return tiles_of_intervals(intervals, batch_size, num_rows, num_keys, packs_documents)


def tiles_of_intervals(
    intervals: VisibleIntervals, batch_size: int, num_rows: int, num_keys: int, packs_documents: bool
) -> tuple[MaskTile, ...]:
    """Return the tiles of a mask, given the visible keys of its rows; adjacent batch items with equal tiles share them.

    For example, if the first two of three items have one causal tile each: a tile with `batch` (0, 2), then the tiles of
    the third. With `packs_documents`, consecutive documents form one tile. The sizes are those of the attention: the mask
    may be broadcast.
    """
    tiles_by_item = [
        tuple(_tiles_of_item(rows if len(rows) == num_rows else rows * num_rows, packs_documents))
        for rows in _row_intervals(intervals, num_keys)  # a single row if the mask is broadcast along rows
    ]
    if len(tiles_by_item) == 1:
        return tuple(replace(tile, batch=(0, batch_size)) for tile in tiles_by_item[0])
    tiles: list[MaskTile] = []
    for item_tiles, equal_items in groupby(range(len(tiles_by_item)), key=tiles_by_item.__getitem__):
        batch_items = list(equal_items)
        tiles.extend(replace(tile, batch=(batch_items[0], batch_items[-1] + 1)) for tile in item_tiles)
    return tuple(tiles)


def visible_intervals(mask: Tensor, finite_hides: bool) -> Tensor:
    """Return the integers [b m 3] of `VisibleIntervals` for a mask [b m n], on the mask's device: (first, stop, sees all).

    Minus infinity always hides a key. Large negative values hide it only if scores are known to be small (`finite_hides`).
    If no key of a row surely has weight (`min_visible`), then hidden keys may have weight, because all scores are very low:
    the interval contains all keys, and the row keeps its mask.
    """
    thresholds = _thresholds(mask.dtype, finite_hides)
    num_keys = mask.shape[-1]
    hidden = mask <= thresholds.max_hiding
    not_hidden = ~hidden
    adds_nothing = ((mask == 0) | hidden).all(-1)
    first = not_hidden.byte().argmax(-1)
    stop = num_keys - not_hidden.flip(-1).byte().argmax(-1)
    any_visible = (mask >= thresholds.min_visible).any(-1)
    first, stop = first * any_visible, torch.where(any_visible, stop, num_keys)
    sees_all = adds_nothing & any_visible & (not_hidden.sum(-1) == stop - first)
    return torch.stack((first, stop, sees_all.long()), -1).int()


def _thresholds(dtype: torch.dtype, finite_hides: bool) -> Thresholds:
    """Return which values of a mask of this dtype show and hide a key."""
    if not finite_hides:
        return INFINITE
    return FINITE_HALF if dtype == torch.float16 else FINITE


def _row_intervals(intervals: VisibleIntervals, num_keys: int) -> list[list[RowInterval]]:
    """Return, for each batch item, the interval of visible keys of each row; the mask may be broadcast along the keys."""
    is_broadcast = intervals.num_keys != num_keys
    return [
        [RowInterval(first, num_keys if is_broadcast else stop, bool(sees_all)) for first, stop, sees_all in rows]
        for rows in intervals.values.tolist()
    ]


def _tiles_of_item(rows: Sequence[RowInterval], packs_documents: bool) -> Iterator[MaskTile]:
    """Yield the tiles of one batch item, given the visible keys of each row.

    Adjacent tiles that are short, or have a mask, are merged into one tile with a mask.
    """
    tiles = list(_packed(rows) if packs_documents else _runs(rows, 0, len(rows)))
    for is_short, adjacent in groupby(tiles, key=_is_short):
        adjacent_tiles = list(adjacent)
        if not is_short or (len(adjacent_tiles) == 1 and adjacent_tiles[0].kind is not TileKind.MIXED):
            yield from adjacent_tiles
            continue
        merged_rows = range(adjacent_tiles[0].rows[0], adjacent_tiles[-1].rows[1])
        keys = min(rows[i].first for i in merged_rows), max(rows[i].stop for i in merged_rows)
        yield MaskTile(TileKind.MIXED, (merged_rows.start, merged_rows.stop), keys)


def _is_short(tile: MaskTile) -> bool:
    """Return whether a tile has a mask, or too few rows to be worth a separate call."""
    return tile.kind is TileKind.MIXED or (tile.kind is not TileKind.PACKED and tile.num_rows < MIN_TILE_ROWS)


def _packed(rows: Sequence[RowInterval]) -> Iterator[MaskTile]:
    """Yield, in the order of rows, tiles of several documents each (for variable-length kernels), and the tiles between them."""
    start = 0
    for document_rows, keys, documents in documents_in(rows, MIN_TILE_ROWS):
        yield from _runs(rows, start, document_rows[0])
        yield MaskTile(TileKind.PACKED, document_rows, keys, documents=documents)
        start = document_rows[1]
    yield from _runs(rows, start, len(rows))


def _runs(rows: Sequence[RowInterval], start: int, end: int) -> Iterator[MaskTile]:
    """Yield the tiles of rows [start, end): each a longest run of rows that all see one interval, in full or causally.

    Causally: each row sees one key more than the row before it. A row that does not see all keys of its interval needs the
    mask: it is a tile alone.
    """
    while start < end:
        row, stop = rows[start], start + 1
        is_causal = stop < end and rows[stop].stop == row.stop + 1
        growth = 1 if is_causal else 0  # keys per row
        while row.sees_all and stop < end and rows[stop] == RowInterval(row.first, row.stop + growth * (stop - start), True):
            stop += 1
        kind = TileKind.CAUSAL if is_causal and stop > start + 1 else TileKind.FULL
        yield MaskTile(kind if row.sees_all else TileKind.MIXED, (start, stop), (row.first, rows[stop - 1].stop))
        start = stop
