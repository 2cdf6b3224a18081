"""Attention of a chunk's queries over the keys they see.

A chunk in the middle of the sequence takes one call of a kernel that aligns its causal mask, or its window, at the last row and
key. Others align it at the first ones, and take two calls: the past, which the chunk sees in full, and the diagonal, which is
square; their results are merged by log-sum-exp. The backward calls the kernel twice as well, with the merged result and
log-sum-exp, as ring attention does. A window that no kernel hides is a bias. A mask that depends on data is taken apart into
pieces first (see `visible.py`), each of which is such a call on some of the rows and some of the keys; documents that lie one
after the other are one call, where a kernel takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamfx.runtime import kernels
from streamfx.runtime.mask_programs import Mask
from streamfx.runtime.plain_attention import LAST, Last
from streamfx.runtime.visible import Kind, Piece

Window = tuple["int | None", "int | None"]
Bias = Callable[[], "Tensor | None"]


class Seen(NamedTuple):
    """What rows see: pieces, and the mask [b h m n] of those that are mixed, with the window in it. `last` says the same of all
    rows, where a kernel's own mask can that ends at the last row and key.
    """

    pieces: Sequence[Piece]
    bias: Bias
    last: Last | None


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
    pieces, bias, last = _seen(query, key, value, mask, first, window, scale, finite_hides)
    if _is_all(pieces, query, key):
        return _forward(pieces[0], query, key, value, bias, last, scale)
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
    pieces, bias, last = _seen(query, key, value, mask, first, window, scale, finite_hides)
    if _is_all(pieces, query, key):
        return _backward(pieces[0], gradient, query, key, value, out, lse, bias, last, scale)
    dq, dk, dv = (torch.zeros_like(item) for item in (query, key, value))
    for piece in pieces:
        own_gradient, own_query, own_out, own_lse = (_rows(piece, item) for item in (gradient, query, out, lse))
        keys, values = _keys(piece, key), _keys(piece, value)
        own_bias = _bias_of(piece, bias)
        own = _backward(piece, own_gradient, own_query, keys, values, own_out, own_lse, own_bias, None, scale)
        _rows(piece, dq).copy_(own[0])
        _keys(piece, dk).add_(own[1])
        _keys(piece, dv).add_(own[2])
    return dq, dk, dv


# -- one call, or a past and a diagonal


def _forward(
    piece: Piece, query: Tensor, key: Tensor, value: Tensor, bias: Bias, last: Last | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    kind = piece.kind
    if piece.documents is not None:
        return kernels.forward(query, key, value, None, piece.documents, scale)
    if kind is Kind.MIXED and last is not None and kernels.aligns_last(query, key, value, scale, last):
        return kernels.forward(query, key, value, None, last, scale)
    if kind is not Kind.CAUSAL:
        return kernels.forward(query, key, value, bias() if kind is Kind.MIXED else None, False, scale)
    past = key.shape[2] - query.shape[2]
    if past == 0 or kernels.aligns_last(query, key, value, scale, LAST):
        return kernels.forward(query, key, value, None, LAST if past else True, scale)
    seen = kernels.forward(query, key[:, :, :past], value[:, :, :past], None, False, scale)
    own = kernels.forward(query, key[:, :, past:], value[:, :, past:], None, True, scale)
    return _merge(seen, own)


def _backward(
    piece: Piece,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Bias,
    last: Last | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = piece.kind
    if piece.documents is not None:
        return kernels.backward(gradient, query, key, value, out, lse, None, piece.documents, scale)
    if kind is Kind.MIXED and last is not None and kernels.aligns_last(query, key, value, scale, last):
        return kernels.backward(gradient, query, key, value, out, lse, None, last, scale)
    if kind is not Kind.CAUSAL:
        mask = bias() if kind is Kind.MIXED else None
        return kernels.backward(gradient, query, key, value, out, lse, mask, False, scale)
    past = key.shape[2] - query.shape[2]
    if past == 0 or kernels.aligns_last(query, key, value, scale, LAST):
        return kernels.backward(gradient, query, key, value, out, lse, None, LAST if past else True, scale)
    seen = kernels.backward(gradient, query, key[:, :, :past], value[:, :, :past], out, lse, None, False, scale)
    own = kernels.backward(gradient, query, key[:, :, past:], value[:, :, past:], out, lse, None, True, scale)
    return seen[0].add_(own[0]), torch.cat((seen[1], own[1]), 2), torch.cat((seen[2], own[2]), 2)


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
) -> Seen:
    batch, rows, keys = query.shape[0], query.shape[2], key.shape[2]
    bounded = first is not None and window is not None and window != (None, None)
    if isinstance(mask, Mask) and not bounded:
        packs = kernels.takes_documents(query, key, value, scale)
        return Seen(mask.pieces(rows, keys, batch, finite_hides, packs), mask.dense, None)
    dense = mask.dense() if isinstance(mask, Mask) else mask
    last = _ends_last(rows, keys, first, window) if dense is None else None
    kind = Kind.FULL if dense is None and not bounded else Kind.CAUSAL if last == LAST else Kind.MIXED
    whole = Piece(kind, (0, rows), (0, keys), (0, batch))
    return Seen((whole,), lambda: _with_window(query, key, dense, first, window), last)


def _ends_last(rows: int, keys: int, first: int | None, window: Window | None) -> Last | None:
    """The window, where each row's own key is the last that it sees, and the last row's own is the last of all."""
    if window is None or first is None or first < 0 or keys - first != rows or window[1] != 0:
        return None
    low = window[0]
    return LAST if low is None else Last(-low) if low <= 0 else None


def _is_all(pieces: Sequence[Piece], query: Tensor, key: Tensor) -> bool:
    """Whether one call does."""
    if len(pieces) != 1:
        return False
    whole = (0, query.shape[2]), (0, key.shape[2]), (0, query.shape[0])
    return (pieces[0].rows, pieces[0].keys, pieces[0].batch) == whole


def _rows(piece: Piece, tensor: Tensor) -> Tensor:
    return tensor[slice(*piece.batch), :, slice(*piece.rows)]


def _keys(piece: Piece, tensor: Tensor) -> Tensor:
    return tensor[slice(*piece.batch), :, slice(*piece.keys)]


def _bias_of(piece: Piece, bias: Bias) -> Bias:
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
