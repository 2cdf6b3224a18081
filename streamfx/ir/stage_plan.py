"""The plan: how large chunks are and what is kept from the forward half, per stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import fx

from streamfx.ir.sizes import Size
from streamfx.node_meta import VALUE

LEAST_WORKING_SET = 64 << 20  # bytes: below this a smaller chunk saves nothing worth having
LEAST_ROWS = 64
MULTIPLE = 8
TILE = 128  # rows: chunks of a multiple of it are what attention's fastest kernels take
TILED = 4 * TILE  # rows from which on rounding to a multiple of `TILE` changes little
NEAR = (0.8, 2.0)  # of the wished number of chunks: so many may be had instead, to have them equal; of 2 ^ n some always can
BUSY_WORKING_SET = 3 << 30  # bytes: so much may be worked on to keep a device busy that needs many rows for that
SHARE = 16  # a chunk's work may take one in so many of the bytes that a step holds, where it saves time
SINGLE = 8  # the same of a single chunk, which needs no totals of sums over chunks


@dataclass(frozen=True)
class AutoChunk:
    """Chunks sized so that the work on one takes about as much memory as one value at a cut, T x d, takes anyway; more where rows
    are still `worthwhile`, up to a small share of what the step holds.

    A sequence that is worthwhile in one chunk may take twice that share: its sums need no totals.

    `row_bytes` is what one row of the sequence takes inside the loop, `stream_bytes` what it takes at a cut; both for the
    whole batch. `held` are the bytes of parameters and gradients, and there are so many `cuts`. To keep the device busy chunks
    have `enough` rows, where these do not take gigabytes. A `working_set` is what the work may take instead, in chunks of `most`
    rows at most: those that it was simulated with, so that no shorter sequence takes more.
    Chunks have a multiple of `granule` rows.
    """

    row_bytes: Size
    stream_bytes: Size
    worthwhile: int = 0
    held: int = 0
    cuts: int = 0
    enough: int = 0
    working_set: int | None = None
    granule: int = 1
    most: int | None = None

    def rows(self, length: int, row_bytes: int, stream_bytes: int) -> int:
        """Rows per chunk for a sequence of `length`: equal chunks of a multiple of `TILE` rows, if there are any near the
        wish."""
        is_limit, working_set = self.working_set is not None, self.working_set
        if working_set is None:
            if self.most is None and self._is_single(length, row_bytes, stream_bytes):
                return length
            working_set = self._bytes_of_work(length, row_bytes, stream_bytes)
        most = max(MULTIPLE if is_limit else LEAST_ROWS, working_set // max(row_bytes, 1))
        most = most if self.most is None else min(most, self.most)
        count = max(1, -(-length // most))
        fewest = count if is_limit else math.ceil(NEAR[0] * count)
        whole = range(fewest, int(NEAR[1] * count) + 1) if length else ()
        if equal := next((n for n in whole if length % (n * math.lcm(TILE, self.granule)) == 0), 0):
            return length // equal
        rows = -(-length // count)
        if rows < TILED:
            rows = -(-rows // MULTIPLE) * MULTIPLE
        elif count > 1:
            rows = rows // TILE * TILE if is_limit else -(-rows // TILE) * TILE
        rows = min(length, -(-rows // self.granule) * self.granule) or 1
        return rows if self.most is None else min(rows, self.most)

    def _is_single(self, length: int, row_bytes: int, stream_bytes: int) -> bool:
        """Whether all rows are worthwhile in one chunk, and its work is small beside what the step holds."""
        return 0 < length <= self.worthwhile and length * row_bytes * SINGLE <= self._bytes_held(length, stream_bytes)

    def _bytes_held(self, length: int, stream_bytes: int) -> int:
        return self.held + self.cuts * length * stream_bytes

    def _bytes_of_work(self, length: int, row_bytes: int, stream_bytes: int) -> int:
        share = self._bytes_held(length, stream_bytes) // SHARE
        busy = min(self.enough * row_bytes, BUSY_WORKING_SET)
        return max(LEAST_WORKING_SET, length * stream_bytes, busy, min(self.worthwhile * row_bytes, share))


ChunkSize: TypeAlias = "int | AutoChunk"


@dataclass(frozen=True)
class ChunkPlan:
    """`chunk_sizes` in rows of the sequence, values `kept` beside the stage's outputs, and outputs that are not kept, by stage.

    Sums over chunks of low-precision numbers grow in float32, but for those that are `narrow`. What is `dropped` is made again
    from the boundary before it, by the same forward loops, when the backward half gets there; what is made between loops, and is
    to be made `again`, from what enters its stage. What is `offloaded` waits on the host for the backward half if it is kept.
    """

    chunk_sizes: tuple[ChunkSize, ...]
    kept: tuple[tuple[fx.Node, ...], ...]
    narrow: frozenset[fx.Node] = frozenset()
    dropped: tuple[tuple[fx.Node, ...], ...] = ()
    offloaded: tuple[tuple[fx.Node, ...], ...] = ()
    again: frozenset[fx.Node] = frozenset()

    def is_dropped(self, node: fx.Node) -> bool:
        """Whether a value of the forward half is made again rather than kept."""
        return node in self._all_dropped or node in self.again

    @cached_property
    def _all_dropped(self) -> frozenset[fx.Node]:
        return frozenset(node for nodes in self.dropped for node in nodes)

    def sum_type(self, value: fx.Node) -> torch.dtype:
        """The type in which a sum over chunks grows."""
        dtype: torch.dtype = value.meta[VALUE].dtype
        is_low = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if is_low and value not in self.narrow else dtype
