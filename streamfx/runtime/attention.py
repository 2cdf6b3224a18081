"""Attention of a chunk's queries over the keys they see.

A chunk in the middle of the sequence takes one call of a kernel that aligns its causal mask at the last row and the last key.
Others align it at the first ones, and take two calls: the past, which the chunk sees in full, and the diagonal, which is square;
their results are merged by log-sum-exp. The backward calls the kernel twice as well, with the merged result and log-sum-exp, as
ring attention does. A mask that depends on data is taken apart into pieces first (see `visible.py`), each of which is such a call
on some of the rows and some of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamfx.runtime import kernels
from streamfx.runtime.mask_programs import Mask
from streamfx.runtime.plain_attention import LAST
from streamfx.runtime.visible import Kind, Piece

Window = tuple["int | None", "int | None"]
Bias = Callable[[], "Tensor | None"]


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
    pieces, bias = _seen(query, key, mask, first, window, finite_hides)
    if _is_all(pieces, query, key):
        return _forward(pieces[0].kind, query, key, value, bias, scale)
    out = query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    for piece in pieces:
        parts = _rows(piece, query), _keys(piece, key), _keys(piece, value)
        own = _forward(piece.kind, *parts, _bias_of(piece, bias), scale)
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
    pieces, bias = _seen(query, key, mask, first, window, finite_hides)
    if _is_all(pieces, query, key):
        return _backward(pieces[0].kind, gradient, query, key, value, out, lse, bias, scale)
    dq, dk, dv = (torch.zeros_like(item) for item in (query, key, value))
    for piece in pieces:
        own_gradient, own_query, own_out, own_lse = (_rows(piece, item) for item in (gradient, query, out, lse))
        keys, values = _keys(piece, key), _keys(piece, value)
        own = _backward(piece.kind, own_gradient, own_query, keys, values, own_out, own_lse, _bias_of(piece, bias), scale)
        _rows(piece, dq).copy_(own[0])
        _keys(piece, dk).add_(own[1])
        _keys(piece, dv).add_(own[2])
    return dq, dk, dv


# -- one call, or a past and a diagonal


def _forward(kind: Kind, query: Tensor, key: Tensor, value: Tensor, bias: Bias, scale: float | None) -> tuple[Tensor, Tensor]:
    if kind is not Kind.CAUSAL:
        return kernels.forward(query, key, value, bias() if kind is Kind.MIXED else None, False, scale)
    past = key.shape[2] - query.shape[2]
    if past == 0 or kernels.aligns_last(query, key, value, scale):
        return kernels.forward(query, key, value, None, LAST if past else True, scale)
    seen = kernels.forward(query, key[:, :, :past], value[:, :, :past], None, False, scale)
    own = kernels.forward(query, key[:, :, past:], value[:, :, past:], None, True, scale)
    return _merge(seen, own)


def _backward(
    kind: Kind,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Bias,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if kind is not Kind.CAUSAL:
        mask = bias() if kind is Kind.MIXED else None
        return kernels.backward(gradient, query, key, value, out, lse, mask, False, scale)
    past = key.shape[2] - query.shape[2]
    if past == 0 or kernels.aligns_last(query, key, value, scale):
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
    query: Tensor, key: Tensor, mask: Tensor | Mask | None, first: int | None, window: Window | None, finite_hides: bool
) -> tuple[Sequence[Piece], Bias]:
    """Pieces, and the mask [b h m n] for those that are mixed, with the window in it."""
    batch, rows, keys = query.shape[0], query.shape[2], key.shape[2]
    bounded = first is not None and window is not None and window != (None, None)
    if isinstance(mask, Mask) and not bounded:
        return mask.pieces(rows, keys, batch, finite_hides), mask.dense
    dense = mask.dense() if isinstance(mask, Mask) else mask
    kind = Kind.MIXED
    if dense is None and not bounded:
        kind = Kind.FULL
    elif dense is None and window == (None, 0) and first is not None and first >= 0 and keys - first == rows:
        kind = Kind.CAUSAL
    return (Piece(kind, (0, rows), (0, keys), (0, batch)),), lambda: _with_window(query, key, dense, first, window)


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
