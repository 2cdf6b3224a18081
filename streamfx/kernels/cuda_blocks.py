"""The gradients of attention in blocks of rows and keys, if one kernel call would allocate too much workspace.

    rows [s, e)  x  keys [0, s)      seen in full, in blocks
    rows [s, e)  x  keys [s, e)      the diagonal

Each block is a call with the output and the log-sum-exp over all keys, as in ring attention, so the gradients of the
blocks add up. The kernel's workspace (a single-precision accumulator of the queries' gradient, gradients of keys for
all query heads) then has the size of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamfx.kernels.plain_attention import Causal

Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
Items: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]"  # gradient, query, key, value, out, log-sum-exp
Kernel: TypeAlias = Callable[..., Gradients]  # (*items, causal, scale)


class KernelTile(NamedTuple):
    """The rows and keys of one call, and its mask."""

    rows: slice
    keys: slice
    causal: Causal


class TileSizes(NamedTuple):
    """The maximum number of rows and keys of one call."""

    rows: int
    keys: int


def gradients(
    kernel: Kernel, items: Items, causal: Causal, scale: float | None, sizes: Callable[[Tensor, Tensor], TileSizes]
) -> Gradients:
    """Return the gradients of queries, keys and values.

    If `sizes` (query, key) allows it, one call computes them. Otherwise they are computed block by block; if the rows
    also exceed one block, one group of heads that share keys is processed at a time.
    """
    query, key, value = items[1:4]
    groups, blocks = key.shape[1], _blocks(query, key, causal, sizes(query, key))
    if len(blocks) == 1:
        return kernel(*items, causal, scale)
    if groups == 1 or blocks[0].rows.stop == query.shape[2]:
        return _sum_over_blocks(kernel, items, blocks, scale)
    results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for group in range(groups):
        group_items: Items = tuple(item.chunk(groups, 1)[group] for item in items)  # type: ignore[assignment]
        group_gradients = _sum_over_blocks(
            kernel, group_items, _blocks(group_items[1], group_items[2], causal, sizes(group_items[1], group_items[2])), scale
        )
        for result, group_gradient in zip(results, group_gradients, strict=True):
            result.chunk(groups, 1)[group].copy_(group_gradient)
        del group_items, group_gradients, group_gradient
    return results


def _sum_over_blocks(kernel: Kernel, items: Items, blocks: Sequence[KernelTile], scale: float | None) -> Gradients:
    """Sum the gradients over blocks.

    Ordered by rows, each row block completes in turn and the accumulators of all keys stay alive to the end; ordered
    by keys, it is the reverse. The order whose long-lived accumulators are smaller is chosen.
    """
    gradient, query, key, value, out, lse = items
    by_rows = key.numel() + value.numel() < query.numel()
    blocks = sorted(blocks, key=lambda block: (block.rows if by_rows else block.keys).start)
    dq = _BlockAccumulators(query, [block.rows for block in blocks])
    dk, dv = (_BlockAccumulators(item, [block.keys for block in blocks]) for item in (key, value))
    for rows, keys, causal in blocks:
        chunk_items = (item[:, :, rows] for item in (gradient, query))
        block_gradients = kernel(
            *chunk_items, key[:, :, keys], value[:, :, keys], out[:, :, rows], lse[:, :, rows].contiguous(), causal, scale
        )
        for accumulators, block, block_gradient in zip((dq, dk, dv), (rows, keys, keys), block_gradients, strict=True):
            accumulators.add(block, block_gradient)
        del block_gradients, block_gradient
    return dq.result, dk.result, dv.result


class _BlockAccumulators:
    """Accumulators of a gradient by block, in single precision or better, until the last contribution to a block has
    been added.
    """

    def __init__(self, like: Tensor, block_slices: Iterable[slice]) -> None:
        """Allocate the gradient; count the contributions that each block will get."""
        self.result = torch.empty_like(like)
        self.remaining = Counter(block.start for block in block_slices)
        self.sums: dict[int, Tensor] = {}

    def add(self, block: slice, contribution: Tensor) -> None:
        """Add a contribution to a block; after the last one, write the sum to the result."""
        self.remaining[block.start] -= 1
        total = self.sums.pop(block.start, None)
        if total is not None:
            contribution = total.add_(contribution)
        if not self.remaining[block.start]:
            self.result[:, :, block].copy_(contribution)
        else:
            self.sums[block.start] = contribution.to(torch.promote_types(contribution.dtype, torch.float32))


def _blocks(query: Tensor, key: Tensor, causal: Causal, sizes: TileSizes) -> list[KernelTile]:
    """Return tiles that cover each visible (row, key) pair once.

    Keys are cut at the same positions as rows, and before the first row.
    """
    rows, keys = query.shape[2], key.shape[2]
    past = keys - rows if causal else keys  # keys that all rows see
    past_cuts, row_cuts = _block_slices(past, sizes.keys), _block_slices(rows, sizes.rows)
    if len(row_cuts) == 1:  # the last tile has the bottom-right mask, which may have a past before it
        past_cuts = past_cuts if keys > sizes.keys + rows else past_cuts[:1]
        key_cuts = [*past_cuts[:-1], slice(past_cuts[-1].start if past_cuts else 0, keys)]
        return [KernelTile(row_cuts[0], key_cut, causal if key_cut.stop == keys else False) for key_cut in key_cuts]
    tiles = [KernelTile(row_cut, key_cut, False) for row_cut in row_cuts for key_cut in past_cuts]
    for i, row_cut in enumerate(row_cuts if causal else ()):
        key_cuts = [slice(past + earlier_cut.start, past + earlier_cut.stop) for earlier_cut in row_cuts[: i + 1]]
        tiles += [KernelTile(row_cut, key_cut, False) for key_cut in key_cuts[:-1]] + [KernelTile(row_cut, key_cuts[-1], causal)]
    return tiles


def _block_slices(count: int, size: int) -> list[slice]:
    """Cut a length into slices of at most `size`."""
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
