"""Attention of a chunk's queries over the keys they see.

A chunk in the middle of the sequence takes one call of a kernel that aligns its causal mask, or its window, at the last row and
key. Others align it at the first ones, and take two calls: the past, which the chunk sees in full, and the diagonal, which is
square; their results are merged by log-sum-exp. The backward calls the kernel twice as well, with the merged result and
log-sum-exp, as ring attention does. A window that no kernel hides is a bias. A mask that depends on data is taken apart into
pieces first (see `mask_tiles.py`), each of which is such a call on some of the rows and some of the keys; documents that lie one
after the other are one call, where a kernel takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamfx.kernels import sdpa
from streamfx.kernels.mask_programs import Mask
from streamfx.kernels.mask_tiles import MaskTile, TileKind
from streamfx.kernels.plain_attention import LAST, BottomRightCausal
from streamfx.torch_private import FakeTensor

Window = tuple["int | None", "int | None"]
Bias = Callable[[], "Tensor | None"]
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


class VisibleKeys(NamedTuple):
    """What rows see: pieces, and the mask [b h m n] of those that are mixed, with the window in it. `last` says the same of all
    rows, where a kernel's own mask can that ends at the last row and key. `is_open`: while costs are predicted, one piece stands
    for several, which data will tell.
    """

    pieces: Sequence[MaskTile]
    bias: Bias
    last: BottomRightCausal | None
    is_open: bool = False


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None,
    first: int | None,
    window: Window | None,
    *,
    scale: float | None = None,
    finite_hides: bool = True,
) -> tuple[Tensor, Tensor]:
    """Result [b h m e] and log-sum-exp [b h m] of queries [b h m d] over keys [b g n d] and values [b g n e].

    `mask` is added to the scores. Query i sees keys i + first + low .. i + first + high of `window` (low, high), None being
    unbounded; without a window it sees all. `finite_hides`: scores are small beside the huge negative numbers of a mask.
    """
    pieces, bias, last, is_open = _seen(query, key, value, mask, first, window, scale, finite_hides)
    if _is_all(pieces, query, key):
        whole = [query.new_empty(*query.shape[:-1], value.shape[-1])] if is_open else []  # beside a piece's own
        made = _forward(pieces[0], query, key, value, bias, last, scale)
        del whole
        return made
    out = query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    for piece in pieces:
        parts = _rows(piece, query), _keys(piece, key), _keys(piece, value)
        own = _forward(piece, *parts, _bias_of(piece, bias), None, scale)
        _rows(piece, out).copy_(own[0])
        _rows(piece, lse).copy_(own[1])
    return out, lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | Mask | None,
    first: int | None,
    window: Window | None,
    *,
    scale: float | None = None,
    finite_hides: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, and the chunk's part of those of the keys and values it sees."""
    pieces, bias, last, is_open = _seen(query, key, value, mask, first, window, scale, finite_hides)
    if _is_all(pieces, query, key):
        whole = [torch.empty_like(item) for item in (query, key, value)] if is_open else []  # beside a piece's own
        made = _backward(pieces[0], gradient, query, key, value, out, lse, bias, last, scale)
        del whole
        return made
    dq, dk, dv = torch.full_like(query, -0.0), torch.zeros_like(key), torch.zeros_like(value)  # -0 + x is x, its sign included
    for piece in pieces:
        own_gradient, own_query, own_out, own_lse = (_rows(piece, item) for item in (gradient, query, out, lse))
        keys, values, own_bias = _keys(piece, key), _keys(piece, value), _bias_of(piece, bias)
        sums = _rows(piece, dq), _keys(piece, dk), _keys(piece, dv)
        for within, call in _calls(piece, own_gradient, own_query, keys, values, own_out, own_lse, own_bias, None, scale):
            _add_to(sums, within, call())
    return dq, dk, dv


def _add_to(sums: Gradients, within: slice, made: Gradients) -> None:
    """Nothing but the sums is left of one call when the next begins."""
    sums[0].add_(made[0])
    sums[1][:, :, within].add_(made[1])
    sums[2][:, :, within].add_(made[2])


# -- one call, or a past and a diagonal


def _forward(
    piece: MaskTile, query: Tensor, key: Tensor, value: Tensor, bias: Bias, last: BottomRightCausal | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    kind = piece.kind
    if piece.documents is not None:
        return sdpa.forward(query, key, value, None, piece.documents, scale)
    if kind is TileKind.MIXED and last is not None and sdpa.aligns_last(query, key, value, scale, last):
        return sdpa.forward(query, key, value, None, last, scale)
    if kind is not TileKind.CAUSAL:
        return sdpa.forward(query, key, value, bias() if kind is TileKind.MIXED else None, False, scale)
    past = key.shape[2] - query.shape[2]
    if past == 0 or sdpa.aligns_last(query, key, value, scale, LAST):
        return sdpa.forward(query, key, value, None, LAST if past else True, scale)
    seen = sdpa.forward(query, key[:, :, :past], value[:, :, :past], None, False, scale)
    own = sdpa.forward(query, key[:, :, past:], value[:, :, past:], None, True, scale)
    return _merge(seen, own)


def _backward(*given: Any) -> Gradients:
    """What the calls make, put together."""
    made = [call() for _, call in _calls(*given)]
    if len(made) == 1:
        return made[0]
    seen, own = made
    return seen[0].add_(own[0]), torch.cat((seen[1], own[1]), 2), torch.cat((seen[2], own[2]), 2)


def _calls(
    piece: MaskTile,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Bias,
    last: BottomRightCausal | None,
    scale: float | None,
) -> list[tuple[slice, Callable[[], Gradients]]]:
    """The calls of a kernel that make the gradients, each with the keys that it is given."""

    def call(within: slice, mask: Bias, causal: Any) -> tuple[slice, Callable[[], Gradients]]:
        keys, values = (key, value) if within == whole else (key[:, :, within], value[:, :, within])
        return within, lambda: sdpa.backward(gradient, query, keys, values, out, lse, mask(), causal, scale)

    kind, whole = piece.kind, slice(None)
    if piece.documents is not None:
        return [call(whole, _nothing, piece.documents)]
    if kind is TileKind.MIXED and last is not None and sdpa.aligns_last(query, key, value, scale, last):
        return [call(whole, _nothing, last)]
    if kind is not TileKind.CAUSAL:
        return [call(whole, bias if kind is TileKind.MIXED else _nothing, False)]
    past = key.shape[2] - query.shape[2]
    if past == 0 or sdpa.aligns_last(query, key, value, scale, LAST):
        return [call(whole, _nothing, LAST if past else True)]
    return [call(slice(past), _nothing, False), call(slice(past, None), _nothing, True)]


def _nothing() -> None:
    """No mask."""


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Put two parts of the keys together: weights are the shares of each part in the sum of exponentials."""
    (out_a, lse_a), (out_b, lse_b) = one, other
    share = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    merged = torch.lerp(out_a.to(share.dtype), out_b.to(share.dtype), share)
    return merged.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


# -- what the rows see


def _seen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None,
    first: int | None,
    window: Window | None,
    scale: float | None,
    finite_hides: bool,
) -> VisibleKeys:
    batch, rows, keys = query.shape[0], query.shape[2], key.shape[2]
    bounded = first is not None and window is not None and window != (None, None)
    if isinstance(mask, Mask) and not bounded:
        packs = sdpa.takes_documents(query, key, value, scale)
        is_open = isinstance(query, FakeTensor) and mask.dense().shape[1] == 1
        return VisibleKeys(mask.pieces(rows, keys, batch, finite_hides, packs), mask.dense, None, is_open)
    dense = mask.dense() if isinstance(mask, Mask) else mask
    last = _ends_last(rows, keys, first, window) if dense is None else None
    kind = TileKind.FULL if dense is None and not bounded else TileKind.CAUSAL if last == LAST else TileKind.MIXED
    whole = MaskTile(kind, (0, rows), (0, keys), (0, batch))
    return VisibleKeys((whole,), lambda: _with_window(query, key, dense, first, window), last)


def _ends_last(rows: int, keys: int, first: int | None, window: Window | None) -> BottomRightCausal | None:
    """The window, where each row's own key is the last that it sees, and the last row's own is the last of all."""
    if window is None or first is None or first < 0 or keys - first != rows or window[1] != 0:
        return None
    low = window[0]
    return LAST if low is None else BottomRightCausal(-low) if low <= 0 else None


def _is_all(pieces: Sequence[MaskTile], query: Tensor, key: Tensor) -> bool:
    """Whether one call does."""
    if len(pieces) != 1:
        return False
    whole = (0, query.shape[2]), (0, key.shape[2]), (0, query.shape[0])
    return (pieces[0].rows, pieces[0].keys, pieces[0].batch) == whole


def _rows(piece: MaskTile, tensor: Tensor) -> Tensor:
    return tensor[slice(*piece.batch), :, slice(*piece.rows)]


def _keys(piece: MaskTile, tensor: Tensor) -> Tensor:
    return tensor[slice(*piece.batch), :, slice(*piece.keys)]


def _bias_of(piece: MaskTile, bias: Bias) -> Bias:
    """The piece's part of the mask [b 1 m n], b being all sequences or 1."""

    def part() -> Tensor | None:
        mask = bias()
        if mask is None:
            return None
        own = mask if mask.shape[0] == 1 else mask[slice(*piece.batch)]
        return own[:, :, slice(*piece.rows), slice(*piece.keys)]

    return part


def _with_window(query: Tensor, key: Tensor, mask: Tensor | None, first: int | None, window: Window | None) -> Tensor | None:
    """The mask and the window as one additive mask."""
    if first is None or window is None or window == (None, None):
        return mask
    low, high = window
    rows = torch.arange(query.shape[2], device=query.device)[:, None] + first
    delta = torch.arange(key.shape[2], device=query.device)[None, :] - rows
    hidden = torch.zeros_like(delta, dtype=torch.bool)
    if low is not None:
        hidden |= delta < low
    if high is not None:
        hidden |= delta > high
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return bias if mask is None else mask + bias
