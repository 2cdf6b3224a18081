"""The plan: chunk sizes, and the forward values that each stage keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import fx

from streamfx.ir.sizes import Size
from streamfx.node_meta import VALUE

LEAST_WORKING_SET = 64 << 20  # bytes: below this, a smaller chunk saves too little
LEAST_ROWS = 64
MULTIPLE = 8
TILE = 128  # rows: the fastest attention kernels take chunks of a multiple of it
TILED = 4 * TILE  # rows: from here on, rounding to a multiple of `TILE` changes little
NEAR = (
    0.8,
    2.0,
)  # allowed ratio to the wished number of chunks, if chunks become equal; a length of 2 ^ n always has such a number
BUSY_WORKING_SET = 3 << 30  # bytes: limit on the work per chunk, if a device needs many rows to be busy
SHARE = 16  # the work per chunk may take 1 / SHARE of the bytes that a step holds, if that saves time
SINGLE = 8  # the same for a single chunk, which needs no totals of sums over chunks


@dataclass(frozen=True)
class AutoChunk:
    """A chunk size such that the work on a chunk takes about the memory of one value at a stage boundary, T x d.

    Chunks are larger if rows are still `worthwhile`, up to a small share of the bytes that the step holds. A sequence
    that is worthwhile in one chunk may take twice that share, because its sums need no totals.

    `row_bytes` is the memory that one row of the sequence takes inside the loop, `stream_bytes` at a stage boundary; both
    for the whole batch. `held` is the bytes of parameters and gradients, `cuts` the number of boundaries. Chunks have
    `enough` rows to keep the device busy, unless these take gigabytes. If `working_set` is set, it limits the work
    instead, in chunks of at most `most` rows: the rows with which it was simulated, so that no shorter sequence takes
    more. Chunks have a multiple of `chunk_alignment` rows.
    """

    row_bytes: Size
    stream_bytes: Size
    worthwhile: int = 0
    held: int = 0
    cuts: int = 0
    enough: int = 0
    working_set: int | None = None
    chunk_alignment: int = 1
    most: int | None = None

    def rows(self, length: int, row_bytes: int, stream_bytes: int) -> int:
        """Return the rows per chunk for a sequence of `length`.

        Prefer equal chunks of a multiple of `TILE` rows, if there is such a size near the wished one.
        """
        is_limit, working_set = self.working_set is not None, self.working_set
        if working_set is None:
            if self.most is None and self._is_single(length, row_bytes, stream_bytes):
                return length
            working_set = self._bytes_of_work(length, row_bytes, stream_bytes)
        most_rows = max(MULTIPLE if is_limit else LEAST_ROWS, working_set // max(row_bytes, 1))
        most_rows = most_rows if self.most is None else min(most_rows, self.most)
        count = max(1, -(-length // most_rows))
        fewest_chunks = count if is_limit else math.ceil(NEAR[0] * count)
        chunk_counts = range(fewest_chunks, int(NEAR[1] * count) + 1) if length else ()
        if equal_chunks := next((n for n in chunk_counts if length % (n * math.lcm(TILE, self.chunk_alignment)) == 0), 0):
            return length // equal_chunks
        rows = -(-length // count)
        if rows < TILED:
            rows = -(-rows // MULTIPLE) * MULTIPLE
        elif count > 1:
            rows = rows // TILE * TILE if is_limit else -(-rows // TILE) * TILE
        rows = min(length, -(-rows // self.chunk_alignment) * self.chunk_alignment) or 1
        return rows if self.most is None else min(rows, self.most)

    def _is_single(self, length: int, row_bytes: int, stream_bytes: int) -> bool:
        """Return whether all rows are worthwhile in one chunk, whose work is small compared with the bytes the step holds."""
        return 0 < length <= self.worthwhile and length * row_bytes * SINGLE <= self._bytes_held(length, stream_bytes)

    def _bytes_held(self, length: int, stream_bytes: int) -> int:
        """Return the bytes that a step holds: parameters, gradients, and the values at stage boundaries."""
        return self.held + self.cuts * length * stream_bytes

    def _bytes_of_work(self, length: int, row_bytes: int, stream_bytes: int) -> int:
        """Return the bytes that the work on a chunk may take."""
        held_share = self._bytes_held(length, stream_bytes) // SHARE
        busy_bytes = min(self.enough * row_bytes, BUSY_WORKING_SET)
        return max(LEAST_WORKING_SET, length * stream_bytes, busy_bytes, min(self.worthwhile * row_bytes, held_share))


ChunkSize: TypeAlias = "int | AutoChunk"


@dataclass(frozen=True)
class StagePlan:
    """The plan per stage: `chunk_sizes` in rows, values `kept` in addition to the stage's outputs, and `dropped` outputs.

    Sums over chunks of low-precision numbers accumulate in float32, unless they are `narrow`. The backward graph
    recomputes `dropped` values from the boundary before them, with the same forward loops, and values between loops that
    are in `again` from the inputs of their stage. `offloaded` values, if kept, wait in host memory for the backward
    graph.
    """

    chunk_sizes: tuple[ChunkSize, ...]
    kept: tuple[tuple[fx.Node, ...], ...]
    narrow: frozenset[fx.Node] = frozenset()
    dropped: tuple[tuple[fx.Node, ...], ...] = ()
    offloaded: tuple[tuple[fx.Node, ...], ...] = ()
    again: frozenset[fx.Node] = frozenset()

    def is_dropped(self, node: fx.Node) -> bool:
        """Return whether a forward value is recomputed rather than kept."""
        return node in self._all_dropped or node in self.again

    @cached_property
    def _all_dropped(self) -> frozenset[fx.Node]:
        """The dropped outputs of all stages."""
        return frozenset(node for nodes in self.dropped for node in nodes)

    def sum_type(self, value: fx.Node) -> torch.dtype:
        """Return the dtype in which a sum over chunks accumulates."""
        dtype: torch.dtype = value.meta[VALUE].dtype
        is_low = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if is_low and value not in self.narrow else dtype
