"""The plan: chunk sizes, and the forward values that each stage keeps.

A loop runs a stage, a segment of the graph, for one chunk of rows of the sequence at a time. Larger chunks run faster, and the
values of one chunk (its *work*) take more memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import fx

from streamfx.ir.sizes import Size
from streamfx.node_meta import VALUE

MIN_WORKING_SET = 64 << 20  # bytes: below this, a smaller chunk saves too little
MIN_ROWS = 64  # per chunk
ROW_MULTIPLE = 8  # small chunks have a multiple of this number of rows
TILE = 128  # rows: the fastest attention kernels take chunks of a multiple of it
MIN_TILED_ROWS = 4 * TILE  # chunks of so many rows are rounded to a multiple of `TILE`, which changes little
# To get equal chunks, their number may be changed by a factor in this range; a length of 2 ^ n then has equal chunks.
CHUNK_COUNT_RATIOS = (0.8, 2.0)
MAX_BUSY_WORKING_SET = 3 << 30  # bytes: limit on the work of the rows that keep a device busy
WORK_SHARE = 16  # the work per chunk may take 1 / 16 of the bytes that a step holds, if that saves time
SINGLE_CHUNK_SHARE = 8  # a single chunk may take 1 / 8 of them, because it needs no totals of sums over chunks


@dataclass(frozen=True)
class AutoChunk:
    """A chunk size such that the work on a chunk takes about the memory of one value at a stage boundary, T x d.

    Chunks are larger if that makes the step faster, up to a share of the bytes that the step holds. A sequence that runs
    efficiently in one chunk may take twice that share, because its sums need no totals.

    `row_bytes`: the memory of one row of the sequence inside the loop, for the full batch.
    `stream_bytes`: the memory of one row at a stage boundary, for the full batch.
    `worthwhile_rows`: up to so many rows per chunk, more rows make the step faster.
    `held_bytes`: the memory of parameters and gradients.
    `num_boundaries`: the number of stage boundaries whose values the step holds.
    `busy_rows`: the rows that keep the device busy; a chunk has as many, unless they take gigabytes.
    `working_set`: if set, the limit on the bytes of work per chunk; it replaces the rules above.
    `chunk_alignment`: chunks have a multiple of this number of rows.
    `max_rows`: the rows per chunk in the simulation, so that no shorter sequence takes more memory.
    `is_loss`: the stage computes the head and the loss, whose chunks have a working set of their own.
    """

    row_bytes: Size
    stream_bytes: Size
    worthwhile_rows: int = 0
    held_bytes: int = 0
    num_boundaries: int = 0
    busy_rows: int = 0
    working_set: int | None = None
    chunk_alignment: int = 1
    max_rows: int | None = None
    is_loss: bool = False

    def rows(self, length: int, row_bytes: int, stream_bytes: int) -> int:
        """Return the rows per chunk for a sequence of `length` rows.

        First find the most rows whose work takes the allowed bytes (`working_set`, or `_bytes_of_work`). Then round: to equal
        chunks of a multiple of `TILE` rows if there are some of about this size, else to a multiple of `TILE` or `ROW_MULTIPLE`.
        `row_bytes`, `stream_bytes`: the values of the fields of these names, evaluated for the sizes of a call.
        """
        is_limit, working_set = self.working_set is not None, self.working_set
        if working_set is None:
            if self.max_rows is None and self._is_single(length, row_bytes, stream_bytes):
                return length
            working_set = self._bytes_of_work(length, row_bytes, stream_bytes)
        row_limit = max(ROW_MULTIPLE if is_limit else MIN_ROWS, working_set // max(row_bytes, 1))
        row_limit = row_limit if self.max_rows is None else min(row_limit, self.max_rows)
        num_chunks = max(1, -(-length // row_limit))
        fewest_chunks = num_chunks if is_limit else math.ceil(CHUNK_COUNT_RATIOS[0] * num_chunks)
        chunk_counts = range(fewest_chunks, int(CHUNK_COUNT_RATIOS[1] * num_chunks) + 1) if length else ()
        if equal_chunks := next((n for n in chunk_counts if length % (n * math.lcm(TILE, self.chunk_alignment)) == 0), 0):
            return length // equal_chunks
        rows = -(-length // num_chunks)
        if rows < MIN_TILED_ROWS:
            rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        elif num_chunks > 1:
            rows = rows // TILE * TILE if is_limit else -(-rows // TILE) * TILE
        rows = min(length, -(-rows // self.chunk_alignment) * self.chunk_alignment) or 1
        return rows if self.max_rows is None else min(rows, self.max_rows)

    def _is_single(self, length: int, row_bytes: int, stream_bytes: int) -> bool:
        """Return whether one chunk has all rows: so many rows still make the step faster, and its work takes few bytes.

        Few are at most 1 / `SINGLE_CHUNK_SHARE` of the bytes that the step holds.
        """
        return 0 < length <= self.worthwhile_rows and length * row_bytes * SINGLE_CHUNK_SHARE <= self._bytes_held(
            length, stream_bytes
        )

    def _bytes_held(self, length: int, stream_bytes: int) -> int:
        """Return the bytes that a step holds: parameters, gradients, and the values at stage boundaries."""
        return self.held_bytes + self.num_boundaries * length * stream_bytes

    def _bytes_of_work(self, length: int, row_bytes: int, stream_bytes: int) -> int:
        """Return the bytes that the work on a chunk may take.

        At least the bytes of one value at a stage boundary, or of the rows that keep the device busy; more if that makes the
        step faster, up to 1 / `WORK_SHARE` of the bytes that the step holds.
        """
        held_share = self._bytes_held(length, stream_bytes) // WORK_SHARE
        busy_bytes = min(self.busy_rows * row_bytes, MAX_BUSY_WORKING_SET)
        return max(MIN_WORKING_SET, length * stream_bytes, busy_bytes, min(self.worthwhile_rows * row_bytes, held_share))


ChunkSize: TypeAlias = "int | AutoChunk"


@dataclass(frozen=True)
class StagePlan:
    """The plan for each stage; tuples have one entry per stage, in forward order.

    `chunk_sizes`: the rows per chunk.
    `kept`: forward values that the backward graph gets in addition to the stage's outputs.
    `low_precision_sums`: sums over chunks that accumulate in their own dtype; others accumulate in float32.
    `dropped`: outputs that the backward graph recomputes from the boundary before them, with the same forward loops.
    `offloaded`: kept values that wait in host memory for the backward graph.
    `recomputed`: values between loops that the backward graph recomputes from the inputs of their stage.
    """

    chunk_sizes: tuple[ChunkSize, ...]
    kept: tuple[tuple[fx.Node, ...], ...]
    low_precision_sums: frozenset[fx.Node] = frozenset()
    dropped: tuple[tuple[fx.Node, ...], ...] = ()
    offloaded: tuple[tuple[fx.Node, ...], ...] = ()
    recomputed: frozenset[fx.Node] = frozenset()

    def is_dropped(self, node: fx.Node) -> bool:
        """Return whether backward recomputes a forward value that it would otherwise get from the forward graph."""
        return node in self._all_dropped or node in self.recomputed

    @cached_property
    def _all_dropped(self) -> frozenset[fx.Node]:
        """The dropped outputs of all stages."""
        return frozenset(node for nodes in self.dropped for node in nodes)

    def sum_type(self, value: fx.Node) -> torch.dtype:
        """Return the dtype in which a sum over chunks accumulates: float32 for half precision, unless the plan excepts it."""
        dtype: torch.dtype = value.meta[VALUE].dtype
        is_low = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if is_low and value not in self.low_precision_sums else dtype
