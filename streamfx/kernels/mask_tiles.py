"""Which keys do a chunk's queries see? A mask, looked at row by row, as few pieces that need no mask.

Padding and packed documents leave each row an interval of keys. Rows that share an interval see it in full; rows whose intervals
start together and grow by a key from row to row see causally. What is neither keeps its mask, cut to the keys that it leaves.
Where a kernel takes many documents in one call, those that lie one after the other are one piece (see `documents.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

import torch
from torch import Tensor

from streamfx.ir.ranges import INFINITY, SEEN_HALF, SWAMPED_BY, SWAMPS, SWAMPS_HALF
from streamfx.kernels.plain_attention import Varlen
from streamfx.kernels.varlen_intervals import RowInterval, documents_in

LEAST_ROWS = 16  # neighbouring pieces of fewer rows are one call with a mask: kernels take longer to start than to run

# The least number that is seen, and the most that hides: where only minus infinity does, in types of float32's range, in float16.
INFINITE, FINITE, FINITE_HALF = (-INFINITY, -INFINITY), (SWAMPED_BY, SWAMPS), (SEEN_HALF, SWAMPS_HALF)


class TileKind(Enum):
    FULL = "full"  # each row sees all keys
    CAUSAL = "causal"  # the last row sees all keys, each row before it one less
    PACKED = "packed"  # what their documents say
    MIXED = "mixed"  # what the mask says


@dataclass(frozen=True)
class MaskTile:
    """Rows [first, stop) of the queries and what they see of keys [first, stop), in sequences [first, stop) of the batch."""

    kind: TileKind
    rows: tuple[int, int]
    keys: tuple[int, int]
    batch: tuple[int, int] = (0, 1)
    documents: Varlen | None = None  # of rows and keys of the piece

    @property
    def count(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class SeenIntervals:
    """What the rows of a mask see, as numbers [b m 3] on the host: the keys [first, stop) outside of which a row sees nothing,
    and whether it sees all of them, with nothing added. The mask has so many `keys`; m and they are 1 where all are alike.
    """

    numbers: Tensor
    keys: int


def pieces_of(mask: Tensor, batch: int, finite_hides: bool = True, packs: bool = False) -> tuple[MaskTile, ...]:
    """What a mask [b m n], which is added to the scores of all heads, lets each row see; b is `batch` or 1."""
    return pieces_in(SeenIntervals(numbers_of(mask, finite_hides), mask.shape[2]), batch, mask.shape[1], mask.shape[2], packs)


def pieces_in(seen: SeenIntervals, batch: int, rows: int, keys: int, packs: bool) -> tuple[MaskTile, ...]:
    """The pieces of so many rows and keys; `packs`: documents that lie one after the other are one."""
    found = [tuple(_pieces(own if len(own) == rows else own * rows, packs)) for own in _intervals(seen, keys)]
    if len(found) == 1:
        return tuple(replace(piece, batch=(0, batch)) for piece in found[0])
    together: list[MaskTile] = []
    for pieces, group in groupby(range(len(found)), key=found.__getitem__):
        members = list(group)
        together.extend(replace(piece, batch=(members[0], members[-1] + 1)) for piece in pieces)
    return tuple(together)


def numbers_of(mask: Tensor, finite_hides: bool) -> Tensor:
    """The numbers of `SeenIntervals`, where the mask is. A row that sees nothing is left to the kernel, with all keys.

    Minus infinity hides; huge negative numbers do only beside scores that are known to be small (`finite_hides`).
    """
    least, most = INFINITE if not finite_hides else FINITE_HALF if mask.dtype == torch.float16 else FINITE
    hidden = mask <= most
    plain = ((mask == 0) | hidden).all(-1)
    seen = ~hidden
    count = seen.sum(-1)
    first = seen.byte().argmax(-1)
    stop = mask.shape[-1] - seen.flip(-1).byte().argmax(-1)
    some = (mask >= least).any(-1)  # else what is hidden may count beside what is seen
    first, stop = first * some, torch.where(some, stop, mask.shape[-1])
    return torch.stack((first, stop, (plain & some & (count == stop - first)).long()), -1).int()


def _intervals(seen: SeenIntervals, keys: int) -> list[list[RowInterval]]:
    """For each sequence its rows."""
    spread = seen.keys != keys  # one key stands for all
    return [
        [RowInterval(first, keys if spread else stop, bool(solid)) for first, stop, solid in rows]
        for rows in seen.numbers.tolist()
    ]


def _pieces(rows: Sequence[RowInterval], packs: bool) -> Iterator[MaskTile]:
    """Long runs of rows that see alike, and masked pieces of what lies between them."""
    runs = list(_packed(rows) if packs else _runs(rows, 0, len(rows)))
    for is_short, group in groupby(runs, key=_is_short):
        members = list(group)
        if not is_short or (len(members) == 1 and members[0].kind is not TileKind.MIXED):
            yield from members
            continue
        inside = range(members[0].rows[0], members[-1].rows[1])
        keys = min(rows[i].first for i in inside), max(rows[i].stop for i in inside)
        yield MaskTile(TileKind.MIXED, (inside.start, inside.stop), keys)


def _is_short(piece: MaskTile) -> bool:
    return piece.kind is TileKind.MIXED or (piece.kind is not TileKind.PACKED and piece.count < LEAST_ROWS)


def _packed(rows: Sequence[RowInterval]) -> Iterator[MaskTile]:
    """Documents, and the runs between them."""
    start = 0
    for own, keys, documents in documents_in(rows, LEAST_ROWS):
        yield from _runs(rows, start, own[0])
        yield MaskTile(TileKind.PACKED, own, keys, documents=documents)
        start = own[1]
    yield from _runs(rows, start, len(rows))


def _runs(rows: Sequence[RowInterval], start: int, end: int) -> Iterator[MaskTile]:
    while start < end:
        row, stop = rows[start], start + 1
        grows = stop < end and rows[stop].stop == row.stop + 1
        while row.solid and stop < end and rows[stop] == RowInterval(row.first, row.stop + grows * (stop - start), True):
            stop += 1
        kind = TileKind.CAUSAL if grows and stop > start + 1 else TileKind.FULL
        yield MaskTile(kind if row.solid else TileKind.MIXED, (start, stop), (row.first, rows[stop - 1].stop))
        start = stop
