"""Chunks of the sequence: their bounds, and the rows of a tensor in each chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

MAX_BLOCK_CHUNKS = 32  # chunks whose rows are sliced together


class Chunks(Sequence[tuple[int, int]]):
    """The bounds (start, stop) of chunks of `step` of `length` rows, in execution order; from the last one if `reverse`.

    They are computed on access, because there may be millions. A sequence of no rows has one chunk (0, 0).
    """

    def __init__(self, length: int, step: int, reverse: bool = False) -> None:
        self._starts = range(0, length, step) or range(1)
        self.length, self.step, self.reverse = length, step, reverse

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        """Return the bounds of the chunk with this index in execution order."""
        start = self._starts[-1 - index if self.reverse else index]
        return start, min(start + self.step, self.length)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the chunks in execution order."""
        step, length = self.step, self.length
        for start in reversed(self._starts) if self.reverse else self._starts:
            yield start, min(start + step, length)

    @property
    def num_lengths(self) -> int:
        """The number of distinct chunk lengths: 2 if the last chunk of the sequence is shorter than the others, else 1."""
        return 1 if len(self) == 1 or self.length % self.step == 0 else 2

    def touching(self, row: int) -> set[int]:
        """Return the indices, in execution order, of the chunks that contain a row, or start or stop at it."""
        candidates = {min(max(0, row // self.step + offset), len(self) - 1) for offset in (-1, 0)}
        in_order = {len(self) - 1 - index if self.reverse else index for index in candidates}
        return {index for index in in_order if self[index][0] <= row <= self[index][1]}


Block = tuple[int, int, int, bool]  # first row, rows per chunk, number of chunks, whether the last chunk runs first


def chunk_blocks(bounds: Sequence[tuple[int, int]]) -> list[Block]:
    """Group adjacent chunks of equal length into blocks of at most `MAX_BLOCK_CHUNKS`, in execution order.

    Ten rows in chunks of 4: (0, 4, 2, False) for the chunks [0, 4) and [4, 8), and (8, 2, 1, False) for [8, 10).
    """
    if not isinstance(bounds, Chunks):
        return [(start, stop - start, 1, False) for start, stop in bounds]
    length, step, is_reversed = bounds.length, bounds.step, bounds.reverse
    full_chunks = length // step
    blocks = [
        (first * step, step, min(MAX_BLOCK_CHUNKS, full_chunks - first), is_reversed)
        for first in range(0, full_chunks, MAX_BLOCK_CHUNKS)
    ]
    if full_chunks < len(bounds):
        blocks.append((full_chunks * step, length - full_chunks * step, 1, is_reversed))
    return blocks[::-1] if is_reversed else blocks


def chunk_slices(tensor: Tensor, dim: int, inner: int, blocks: Sequence[Block]) -> Iterator[Tensor]:
    """Yield a view of each chunk's rows, along dimension `dim` with `inner` elements per row, in execution order.

    The views of a block are created by one call, which takes a third of the time of separate calls.
    """
    for start, rows, num_chunks, is_reversed in blocks:
        if num_chunks == 1:
            yield tensor.narrow(dim, start * inner, rows * inner)
            continue
        shape, strides = tensor.shape, tensor.stride()
        step, offset = strides[dim] * inner, tensor.storage_offset()
        views = tensor.as_strided(
            (*shape[:dim], num_chunks, rows * inner, *shape[dim + 1 :]),
            (*strides[:dim], rows * step, *strides[dim:]),
            offset + start * step,
        ).unbind(dim)
        yield from reversed(views) if is_reversed else views
