"""The gradients of attention in blocks of rows and keys, where a kernel would take much memory for itself.

    rows [s, e)  x  keys [0, s)      seen in full, in blocks
    rows [s, e)  x  keys [s, e)      the diagonal

Each block is a call with the result and the log-sum-exp of all keys, as in ring attention: its parts add up. What a kernel makes
for itself (a sum of the queries' gradient in single precision, gradients of keys for all query heads) is then that of a block.
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
Kernel: TypeAlias = Callable[..., Gradients]  # of items, whether they are causal, and a scale


class KernelTile(NamedTuple):
    """Rows that a call takes with keys, and what it hides of these."""

    rows: slice
    keys: slice
    causal: Causal


class TileSizes(NamedTuple):
    """So many rows and keys a call takes at most."""

    rows: int
    keys: int


def gradients(
    kernel: Kernel, items: Items, causal: Causal, scale: float | None, sizes: Callable[[Tensor, Tensor], TileSizes]
) -> Gradients:
    """Of queries, keys and values: in one call if `sizes` (query, key) allows it; else in blocks, and where rows are many, of the
    heads that share keys at a time.
    """
    query, key, value = items[1:4]
    groups, blocks = key.shape[1], _blocks(query, key, causal, sizes(query, key))
    if len(blocks) == 1:
        return kernel(*items, causal, scale)
    if groups == 1 or blocks[0].rows.stop == query.shape[2]:
        return _summed(kernel, items, blocks, scale)
    made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for group in range(groups):
        own: Items = tuple(item.chunk(groups, 1)[group] for item in items)  # type: ignore[assignment]
        parts = _summed(kernel, own, _blocks(own[1], own[2], causal, sizes(own[1], own[2])), scale)
        for whole, part in zip(made, parts, strict=True):
            whole.chunk(groups, 1)[group].copy_(part)
        del own, parts, part
    return made


def _summed(kernel: Kernel, items: Items, blocks: Sequence[KernelTile], scale: float | None) -> Gradients:
    """Rows are complete one block after the other, and sums of all keys stay to the end, or the other way round: what is less."""
    gradient, query, key, value, out, lse = items
    by_rows = key.numel() + value.numel() < query.numel()
    blocks = sorted(blocks, key=lambda block: (block.rows if by_rows else block.keys).start)
    dq = _Sums(query, [block.rows for block in blocks])
    dk, dv = (_Sums(item, [block.keys for block in blocks]) for item in (key, value))
    for rows, keys, causal in blocks:
        own = (item[:, :, rows] for item in (gradient, query))
        parts = kernel(*own, key[:, :, keys], value[:, :, keys], out[:, :, rows], lse[:, :, rows].contiguous(), causal, scale)
        for sums, place, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            sums.add(place, part)
        del parts, part
    return dq.whole, dk.whole, dv.whole


class _Sums:
    """Of parts of a gradient, by place: in single precision, or better, until the last part has come."""

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
    """All that rows see, each pair once: keys are cut where rows are, and before the first of these."""
    rows, keys = query.shape[2], key.shape[2]
    past = keys - rows if causal else keys  # so many all rows see
    before, parts = _cuts(past, sizes.keys), _cuts(rows, sizes.rows)
    if len(parts) == 1:  # what a mask hides that ends at the last row and key may have keys before it
        before = before if keys > sizes.keys + rows else before[:1]
        own = [*before[:-1], slice(before[-1].start if before else 0, keys)]
        return [KernelTile(parts[0], place, causal if place.stop == keys else False) for place in own]
    found = [KernelTile(part, place, False) for part in parts for place in before]
    for i, part in enumerate(parts if causal else ()):
        own = [slice(past + other.start, past + other.stop) for other in parts[: i + 1]]
        found += [KernelTile(part, place, False) for place in own[:-1]] + [KernelTile(part, own[-1], causal)]
    return found


def _cuts(count: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
