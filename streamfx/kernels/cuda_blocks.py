"""The gradients of attention in tiles of rows and keys, if one kernel call would allocate too much workspace.

    rows [s, e)  x  keys [0, s)      all keys are visible: divided into tiles
    rows [s, e)  x  keys [s, e)      the diagonal

Rows are queries; the past are the keys before the first row, which all rows see. Each tile is a call with the output and
the log-sum-exp over all keys, as in ring attention, so the gradients of the tiles add up. The kernel's workspace (a
single-precision accumulator of the queries' gradient, gradients of keys for all query heads) then has the size of a tile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamfx.kernels.attention_call import AttentionCall, Causal, Gradients

Results: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # the gradient of the output, the output, the log-sum-exp
Kernel: TypeAlias = Callable[..., Gradients]  # (call, *results)


class KernelTile(NamedTuple):
    """The rows and keys of one call, and its mask."""

    rows: slice
    keys: slice
    causal: Causal


class TileSizes(NamedTuple):
    """The maximum number of rows and keys of one call."""

    num_rows: int
    num_keys: int


def gradients(kernel: Kernel, call: AttentionCall, results: Results, max_tile: Callable[[AttentionCall], TileSizes]) -> Gradients:
    """Return the gradients (dq, dk, dv), in as many kernel calls as `max_tile(call)`, the limit of a call, requires.

    One tile: one call. Otherwise calls are summed over tiles. If rows are split, each key head and its query heads (a
    group) are processed alone, so that accumulators of only one key head are alive.
    """
    groups = call.key.shape[1]
    tiles = _tiles(call, max_tile(call))
    if len(tiles) == 1:
        return kernel(call, *results)
    rows_fit_in_one_tile = tiles[0].rows.stop == call.query.shape[2]
    if groups == 1 or rows_fit_in_one_tile:
        return _sum_over_tiles(kernel, call, results, tiles)
    totals = torch.empty_like(call.query), torch.empty_like(call.key), torch.empty_like(call.value)
    for group in range(groups):
        query, key, value, gradient, out, lse = (operand.chunk(groups, 1)[group] for operand in (*call[:3], *results))
        group_call = call._replace(query=query, key=key, value=value)
        tiles = _tiles(group_call, max_tile(group_call))
        group_gradients = _sum_over_tiles(kernel, group_call, (gradient, out, lse), tiles)
        for total, group_gradient in zip(totals, group_gradients, strict=True):
            total.chunk(groups, 1)[group].copy_(group_gradient)
        del group_gradients, group_gradient
    return totals


def _sum_over_tiles(kernel: Kernel, call: AttentionCall, results: Results, tiles: Sequence[KernelTile]) -> Gradients:
    """Run the kernel on each tile; return the sums of the gradients (dq, dk, dv).

    If tiles are sorted by rows, dq of one slice of rows is complete before the next slice starts, but float32 accumulators
    of dk and dv are alive to the end; if they are sorted by keys, the reverse. The smaller accumulators stay alive.
    """
    query, key, value = call[:3]
    by_rows = key.numel() + value.numel() < query.numel()
    tiles = sorted(tiles, key=lambda tile: (tile.rows if by_rows else tile.keys).start)
    dq = _SliceAccumulators(query, [tile.rows for tile in tiles])
    dk, dv = (_SliceAccumulators(heads, [tile.keys for tile in tiles]) for heads in (key, value))
    for rows, keys, causal in tiles:
        gradient, out, lse = (result[:, :, rows] for result in results)
        tile_call = AttentionCall(query[:, :, rows], key[:, :, keys], value[:, :, keys], None, causal, call.scale)
        tile_gradients = kernel(tile_call, gradient, out, lse.contiguous())
        for accumulators, target, tile_gradient in zip((dq, dk, dv), (rows, keys, keys), tile_gradients, strict=True):
            accumulators.add(target, tile_gradient)
        del tile_gradients, tile_gradient
    return dq.result, dk.result, dv.result


class _SliceAccumulators:
    """Accumulates a gradient [b h n d] by slices of its rows (dimension 2), in single precision or better.

    Several tiles contribute to a slice. Its accumulator is freed after the last contribution, which is written to `result`.
    """

    def __init__(self, like: Tensor, slices: Iterable[slice]) -> None:
        """Allocate the gradient of `like`; `slices` has the slice of each tile, so a slice occurs once per contribution."""
        self.result = torch.empty_like(like)
        self.num_remaining = Counter(contributed.start for contributed in slices)  # by the start of a slice
        self.sums: dict[int, Tensor] = {}  # by the start of a slice

    def add(self, target: slice, contribution: Tensor) -> None:
        """Add a contribution to a slice; after the last one, write the sum to the result."""
        self.num_remaining[target.start] -= 1
        total = self.sums.pop(target.start, None)
        if total is not None:
            contribution = total.add_(contribution)
        if not self.num_remaining[target.start]:
            self.result[:, :, target].copy_(contribution)
        else:
            self.sums[target.start] = contribution.to(torch.promote_types(contribution.dtype, torch.float32))


def _tiles(call: AttentionCall, max_tile: TileSizes) -> list[KernelTile]:
    """Return tiles of at most `max_tile` rows and keys that cover each visible (row, key) pair once.

    Under a causal mask, the keys of the rows themselves are divided at the same positions as the rows, so only tiles on the
    diagonal need the mask. The keys before them (the past) are divided separately.
    """
    rows, keys, causal = call.query.shape[2], call.key.shape[2], call.causal
    past = keys - rows if causal else keys  # keys that all rows see
    past_slices, row_slices = _slices(past, max_tile.num_keys), _slices(rows, max_tile.num_rows)
    if len(row_slices) == 1:  # the last tile has the bottom-right mask, which may have a past before it
        past_slices = past_slices if keys > max_tile.num_keys + rows else past_slices[:1]
        key_slices = [*past_slices[:-1], slice(past_slices[-1].start if past_slices else 0, keys)]
        return [KernelTile(row_slices[0], key_slice, causal if key_slice.stop == keys else False) for key_slice in key_slices]
    tiles = [KernelTile(row_slice, key_slice, False) for row_slice in row_slices for key_slice in past_slices]
    for i, row_slice in enumerate(row_slices if causal else ()):
        key_slices = [slice(past + earlier_slice.start, past + earlier_slice.stop) for earlier_slice in row_slices[: i + 1]]
        tiles += [KernelTile(row_slice, key_slice, False) for key_slice in key_slices[:-1]] + [
            KernelTile(row_slice, key_slices[-1], causal)
        ]
    return tiles


def _slices(length: int, max_size: int) -> list[slice]:
    """Divide positions 0 to `length` into slices of at most `max_size`."""
    return [slice(start, min(start + max_size, length)) for start in range(0, length, max_size)]
