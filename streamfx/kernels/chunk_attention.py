"""Attention of a chunk's queries over their visible keys.

Sizes: b batch, h query heads, g heads of keys and values, m queries (the chunk's rows of the sequence), n keys, d and e
head widths. `scale` multiplies the scores; None: 1 / sqrt(d). With a `window` (low, high), query i sees keys i + first_query +
low .. i + first_query + high, where None is unbounded: `first_query` is the position of the first query minus the position of
the first key, so the index of the first query's own key. A tile
(`MaskTile`) is a range of queries, with a range of keys.

If a kernel aligns its causal mask, or its window, at the last query and the last key (bottom right), a chunk in the
middle of the sequence takes one call. Other kernels align it at the first query and key (top left). With these kernels, a chunk
takes two calls: one for the past, which all its queries see in full, and one for the square diagonal; the results are
merged by log-sum-exp. The backward also calls the kernel twice, with the merged output and log-sum-exp, as ring
attention does. A window that no kernel supports becomes a bias.

A data-dependent mask is first decomposed into tiles (see `mask_tiles.py`), each of which is such a call. Consecutive
documents take one call if a kernel supports variable-length sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamfx.kernels import sdpa
from streamfx.kernels.attention_call import BOTTOM_RIGHT, AttentionCall, BottomRightCausal, Gradients, Result
from streamfx.kernels.mask_programs import Mask
from streamfx.kernels.mask_tiles import MaskTile, TileKind
from streamfx.torch_private import FakeTensor

Window = tuple["int | None", "int | None"]  # (low, high): see `forward`
Bias = Callable[[], "Tensor | None"]  # computes the mask that is added to scores, only for a kernel that needs it


class VisibleKeys(NamedTuple):
    """The keys that a chunk's queries see: tiles, and the bias [b h m n] for mixed tiles, which includes the window.

    `bottom_right` is set if a kernel's own bottom-right mask expresses the visible keys of all queries. `is_estimate` is
    set only while costs are predicted: one tile then represents several, because the real tiles depend on data.
    """

    tiles: Sequence[MaskTile]
    bias: Bias
    bottom_right: BottomRightCausal | None
    is_estimate: bool = False


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None,
    first_query: int | None,
    window: Window | None,
    *,
    scale: float | None = None,
    finite_hides: bool = True,
) -> Result:
    """Return the output [b h m e] and log-sum-exp [b h m] of queries [b h m d] over keys [b g n d] and values [b g n e].

    `mask` is added to the scores. With a `window` (low, high), query i sees keys i + first_query + low .. i + first_query +
    high; otherwise all keys. `finite_hides`: scores are small compared with the large negative values of the mask, so that
    such values hide a key as minus infinity does.
    """
    call = AttentionCall(query, key, value, scale=scale)
    tiles, bias, bottom_right, is_estimate = _visible_keys(call, mask, first_query, window, finite_hides)
    if _is_single_call(tiles, query, key):
        full_output = [query.new_empty(*query.shape[:-1], value.shape[-1])] if is_estimate else []  # counted while the tile runs
        result = _forward(tiles[0], call, bias, bottom_right)
        del full_output
        return result
    out = query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    for tile in tiles:
        result = _forward(tile, _call_of_tile(tile, call), _bias_of(tile, bias), None)
        _rows_of_tile(tile, out).copy_(result[0])
        _rows_of_tile(tile, lse).copy_(result[1])
    return out, lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | Mask | None,
    first_query: int | None,
    window: Window | None,
    *,
    scale: float | None = None,
    finite_hides: bool = True,
) -> Gradients:
    """Return (dq, dk, dv): the gradients of the queries, and the chunk's contribution to those of its keys and values.

    `gradient`, `out`, `lse`: the output's gradient, and both results of `forward`. The other arguments are those of `forward`:
    `mask` is added to the scores, and large negative values of it hide a key only if `finite_hides`.
    """
    call = AttentionCall(query, key, value, scale=scale)
    tiles, bias, bottom_right, is_estimate = _visible_keys(call, mask, first_query, window, finite_hides)
    if _is_single_call(tiles, query, key):
        # real runs with several tiles also have the gradients of all keys; they are counted while the tile runs
        full_gradients = [torch.empty_like(operand) for operand in (query, key, value)] if is_estimate else []
        gradients = _backward(tiles[0], call, gradient, out, lse, bias, bottom_right)
        del full_gradients
        return gradients
    dq, dk, dv = torch.full_like(query, -0.0), torch.zeros_like(key), torch.zeros_like(value)  # -0 + x == x, also for x = -0
    for tile in tiles:
        results = [_rows_of_tile(tile, operand) for operand in (gradient, out, lse)]
        totals = _rows_of_tile(tile, dq), _keys_of_tile(tile, dk), _keys_of_tile(tile, dv)
        for key_range, kernel_call in _calls(tile, _call_of_tile(tile, call), _bias_of(tile, bias), None):
            _add_to(totals, key_range, sdpa.backward(kernel_call, *results))
    return dq, dk, dv


def _add_to(totals: Gradients, key_range: slice, gradients: Gradients) -> None:
    """Add the gradients (dq, dk, dv) of one call to `totals`, where `key_range` are the keys that the call reads.

    The caller drops the gradients, so that only `totals` are alive in the next call.
    """
    totals[0].add_(gradients[0])
    totals[1][:, :, key_range].add_(gradients[1])
    totals[2][:, :, key_range].add_(gradients[2])


# -- the calls of one tile: one call, or the past and the diagonal


def _forward(tile: MaskTile, call: AttentionCall, bias: Bias, bottom_right: BottomRightCausal | None) -> Result:
    """Run all calls of a tile (see `_calls`); return the output and the log-sum-exp over all its keys."""
    results = [sdpa.forward(kernel_call) for _, kernel_call in _calls(tile, call, bias, bottom_right)]
    return results[0] if len(results) == 1 else _merge(*results)


def _backward(
    tile: MaskTile,
    call: AttentionCall,
    gradient: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Bias,
    bottom_right: BottomRightCausal | None,
) -> Gradients:
    """Run all calls of a tile (see `_calls`).

    Return (dq, dk, dv): the sum of the calls' dq, and their dk and dv concatenated, because each call reads other keys.
    """
    gradients = [sdpa.backward(kernel_call, gradient, out, lse) for _, kernel_call in _calls(tile, call, bias, bottom_right)]
    if len(gradients) == 1:
        return gradients[0]
    past, diagonal = gradients
    return past[0].add_(diagonal[0]), torch.cat((past[1], diagonal[1]), 2), torch.cat((past[2], diagonal[2]), 2)


def _calls(
    tile: MaskTile, call: AttentionCall, bias: Bias, bottom_right: BottomRightCausal | None
) -> Iterator[tuple[slice, AttentionCall]]:
    """Yield the kernel calls that compute a tile: (the slice of keys that the call reads, the call) for each.

    `call` has the tile's rows and keys, and no mask. There is one call; a causal tile may take one for the past (the keys
    before the first query) and one for the diagonal. `bottom_right`: if not None, this mask of the kernel replaces the bias of
    a mixed tile, if the kernel supports it.
    """
    kind, all_keys = tile.kind, slice(None)
    past = call.key.shape[2] - call.query.shape[2]
    if tile.documents is not None:
        yield all_keys, call._replace(causal=tile.documents)
    elif kind is TileKind.MIXED and bottom_right is not None and sdpa.supports_bottom_right(call, bottom_right):
        yield all_keys, call._replace(causal=bottom_right)
    elif kind is TileKind.MIXED:
        yield all_keys, call._replace(bias=bias())
    elif kind is not TileKind.CAUSAL:
        yield all_keys, call
    elif past == 0 or sdpa.supports_bottom_right(call, BOTTOM_RIGHT):
        yield all_keys, call._replace(causal=BOTTOM_RIGHT if past else True)
    else:
        for key_range, causal in ((slice(past), False), (slice(past, None), True)):
            keys, values = call.key[:, :, key_range], call.value[:, :, key_range]
            yield key_range, call._replace(key=keys, value=values, causal=causal)


def _merge(left: Result, right: Result) -> Result:
    """Merge (output, log-sum-exp) of the same queries over two slices of the keys.

    The weight of each output is its share in the sum of exponentials: exp(lse_b) / (exp(lse_a) + exp(lse_b)) for the second.
    """
    (out_a, lse_a), (out_b, lse_b) = left, right
    share = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    merged = torch.lerp(out_a.to(share.dtype), out_b.to(share.dtype), share)
    return merged.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


# -- visible keys


def _visible_keys(
    call: AttentionCall, mask: Tensor | Mask | None, first_query: int | None, window: Window | None, finite_hides: bool
) -> VisibleKeys:
    """Return the tiles of the queries, and the mask of mixed tiles; the arguments are those of `forward`.

    A data-dependent mask (`Mask`) without a window is decomposed into tiles; otherwise there is a single tile.
    """
    query, key = call.query, call.key
    batch_size, num_rows, num_keys = query.shape[0], query.shape[2], key.shape[2]
    has_window = first_query is not None and window is not None and window != (None, None)
    if isinstance(mask, Mask) and not has_window:
        packs_documents = sdpa.supports_documents(call)
        is_estimate = isinstance(query, FakeTensor) and mask.dense().shape[1] == 1  # one mask for all heads: real runs have tiles
        tiles = mask.tiles(num_rows, num_keys, batch_size, finite_hides, packs_documents)
        return VisibleKeys(tiles, mask.dense, None, is_estimate)
    dense = mask.dense() if isinstance(mask, Mask) else mask
    bottom_right = _bottom_right(num_rows, num_keys, first_query, window) if dense is None else None
    if dense is None and not has_window:
        kind = TileKind.FULL
    else:
        kind = TileKind.CAUSAL if bottom_right == BOTTOM_RIGHT else TileKind.MIXED
    tile = MaskTile(kind, (0, num_rows), (0, num_keys), (0, batch_size))
    return VisibleKeys((tile,), lambda: _with_window(query, key, dense, first_query, window), bottom_right)


def _bottom_right(num_rows: int, num_keys: int, first_query: int | None, window: Window | None) -> BottomRightCausal | None:
    """Return the window as the mask that kernels have themselves: each query sees the keys up to its own, the last query all.

    None if the window does not end at each query's own key, or if the own key of the last query is not the last key.
    """
    if window is None or first_query is None or first_query < 0 or first_query + num_rows != num_keys:
        return None
    low, high = window
    if high != 0:
        return None
    if low is None:
        return BOTTOM_RIGHT
    return BottomRightCausal(left=-low) if low <= 0 else None


def _is_single_call(tiles: Sequence[MaskTile], query: Tensor, key: Tensor) -> bool:
    """Return whether a single tile covers all queries, keys and batch items, so that one call suffices."""
    if len(tiles) != 1:
        return False
    full = (0, query.shape[2]), (0, key.shape[2]), (0, query.shape[0])
    return (tiles[0].rows, tiles[0].keys, tiles[0].batch) == full


def _call_of_tile(tile: MaskTile, call: AttentionCall) -> AttentionCall:
    """Return the call for a tile's rows and keys only."""
    key, value = _keys_of_tile(tile, call.key), _keys_of_tile(tile, call.value)
    return call._replace(query=_rows_of_tile(tile, call.query), key=key, value=value)


def _rows_of_tile(tile: MaskTile, tensor: Tensor) -> Tensor:
    """Return the slice of a tensor [b h m ..] with the tile's batch items and query positions."""
    return tensor[slice(*tile.batch), :, slice(*tile.rows)]


def _keys_of_tile(tile: MaskTile, tensor: Tensor) -> Tensor:
    """Return the slice of a tensor [b g n ..] with the tile's batch items and key positions."""
    return tensor[slice(*tile.batch), :, slice(*tile.keys)]


def _bias_of(tile: MaskTile, bias: Bias) -> Bias:
    """Return a function that computes the tile's slice of the mask [b h m n], where b is the batch size or 1."""

    def tile_bias() -> Tensor | None:
        """Return the bias of the tile, or None without one."""
        mask = bias()
        if mask is None:
            return None
        batch_mask = mask if mask.shape[0] == 1 else mask[slice(*tile.batch)]
        return batch_mask[:, :, slice(*tile.rows), slice(*tile.keys)]

    return tile_bias


def _with_window(
    query: Tensor, key: Tensor, mask: Tensor | None, first_query: int | None, window: Window | None
) -> Tensor | None:
    """Return one additive mask [.. m n] for the mask and the window; None if there is neither."""
    if first_query is None or window is None or window == (None, None):
        return mask
    low, high = window
    own_keys = torch.arange(query.shape[2], device=query.device)[:, None] + first_query  # index of each query's own key
    delta = torch.arange(key.shape[2], device=query.device)[None, :] - own_keys
    hidden = torch.zeros_like(delta, dtype=torch.bool)
    if low is not None:
        hidden |= delta < low
    if high is not None:
        hidden |= delta > high
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return bias if mask is None else mask + bias
