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
        return _summed(kernel, items, blocks, scale)
    results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for group in range(groups):
        group_items: Items = tuple(item.chunk(groups, 1)[group] for item in items)  # type: ignore[assignment]
        group_gradients = _summed(
            kernel, group_items, _blocks(group_items[1], group_items[2], causal, sizes(group_items[1], group_items[2])), scale
        )
        for result, group_gradient in zip(results, group_gradients, strict=True):
            result.chunk(groups, 1)[group].copy_(group_gradient)
        del group_items, group_gradients, group_gradient
    return results


def _summed(kernel: Kernel, items: Items, blocks: Sequence[KernelTile], scale: float | None) -> Gradients:
    """Sum the gradients over blocks.

    Ordered by rows, each row block completes in turn and the accumulators of all keys stay alive to the end; ordered
    by keys, it is the reverse. The order whose long-lived accumulators are smaller is chosen.
    """
    gradient, query, key, value, out, lse = items
    by_rows = key.numel() + value.numel() < query.numel()
    blocks = sorted(blocks, key=lambda block: (block.rows if by_rows else block.keys).start)
    dq = _Sums(query, [block.rows for block in blocks])
    dk, dv = (_Sums(item, [block.keys for block in blocks]) for item in (key, value))
    for rows, keys, causal in blocks:
        chunk_items = (item[:, :, rows] for item in (gradient, query))
        block_gradients = kernel(
            *chunk_items, key[:, :, keys], value[:, :, keys], out[:, :, rows], lse[:, :, rows].contiguous(), causal, scale
        )
        for sums, place, block_gradient in zip((dq, dk, dv), (rows, keys, keys), block_gradients, strict=True):
            sums.add(place, block_gradient)
        del block_gradients, block_gradient
    return dq.whole, dk.whole, dv.whole


class _Sums:
    """Accumulators of a gradient by block, in single precision or better, until the last contribution to a block has
    been added.
    """

    def __init__(self, like: Tensor, places: Iterable[slice]) -> None:
        self.whole = torch.empty_like(like)
        self.left = Counter(place.start for place in places)
        self.sums: dict[int, Tensor] = {}

    def add(self, place: slice, part: Tensor) -> None:
        self.left[place.start] -= 1
        total = self.sums.pop(place.start, None)
        if total is not None:
            part = total.add_(part)
        if not self.left[place.start]:
            self.whole[:, :, place].copy_(part)
        else:
            self.sums[place.start] = part.to(torch.promote_types(part.dtype, torch.float32))


def _blocks(query: Tensor, key: Tensor, causal: Causal, sizes: TileSizes) -> list[KernelTile]:
    """Return tiles that cover each visible (row, key) pair once.

    Keys are cut at the same positions as rows, and before the first row.
    """
    rows, keys = query.shape[2], key.shape[2]
    past = keys - rows if causal else keys  # keys that all rows see
    past_cuts, row_cuts = _cuts(past, sizes.keys), _cuts(rows, sizes.rows)
    if len(row_cuts) == 1:  # the last tile has the bottom-right mask, which may have a past before it
        past_cuts = past_cuts if keys > sizes.keys + rows else past_cuts[:1]
        key_cuts = [*past_cuts[:-1], slice(past_cuts[-1].start if past_cuts else 0, keys)]
        return [KernelTile(row_cuts[0], place, causal if place.stop == keys else False) for place in key_cuts]
    tiles = [KernelTile(row_cut, place, False) for row_cut in row_cuts for place in past_cuts]
    for i, row_cut in enumerate(row_cuts if causal else ()):
        key_cuts = [slice(past + other.start, past + other.stop) for other in row_cuts[: i + 1]]
        tiles += [KernelTile(row_cut, place, False) for place in key_cuts[:-1]] + [KernelTile(row_cut, key_cuts[-1], causal)]
    return tiles


def _cuts(count: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
