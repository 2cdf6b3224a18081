"""Attention of a chunk's queries over the keys they see.

Kernels align a causal mask at the first row and the first key, so a chunk in the middle of the sequence takes two calls: the
past, which it sees in full, and the diagonal, which is square; their results are merged by log-sum-exp. The backward calls
the kernel twice as well, with the merged result and log-sum-exp, as ring attention does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.runtime import kernels

Window = tuple["int | None", "int | None"]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    first: int | None,
    window: Window | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Result [b h m e] and log-sum-exp [b h m] of queries [b h m d] over keys [b g n d] and values [b g n e].

    `mask` is added to the scores. Query i sees keys i + first + low .. i + first + high of `window` (low, high), None being
    unbounded; without a window it sees all.
    """
    past = _split(query, key, mask, first, window)
    if past is None:
        bias = _bias(query, key, mask, first, window)
        return kernels.forward(query, key, value, bias, False, scale)
    if past == 0:
        return kernels.forward(query, key, value, None, True, scale)
    seen = kernels.forward(query, key[:, :, :past], value[:, :, :past], None, False, scale)
    own = kernels.forward(query, key[:, :, past:], value[:, :, past:], None, True, scale)
    return _merge(seen, own)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    first: int | None,
    window: Window | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, and the chunk's part of those of the keys and values it sees."""
    past = _split(query, key, mask, first, window)
    if past is None:
        bias = _bias(query, key, mask, first, window)
        return kernels.backward(gradient, query, key, value, out, lse, bias, False, scale)
    if past == 0:
        return kernels.backward(gradient, query, key, value, out, lse, None, True, scale)
    seen = kernels.backward(gradient, query, key[:, :, :past], value[:, :, :past], out, lse, None, False, scale)
    own = kernels.backward(gradient, query, key[:, :, past:], value[:, :, past:], out, lse, None, True, scale)
    return seen[0].add_(own[0]), torch.cat((seen[1], own[1]), 2), torch.cat((seen[2], own[2]), 2)


def _split(query: Tensor, key: Tensor, mask: Tensor | None, first: int | None, window: Window | None) -> int | None:
    """How many keys lie in the past of all queries, when the rest is a causal square; None for any other shape."""
    if mask is not None or first is None or window != (None, 0):
        return None
    return first if key.shape[2] - first == query.shape[2] else None


def _bias(query: Tensor, key: Tensor, mask: Tensor | None, first: int | None, window: Window | None) -> Tensor | None:
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


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Put two parts of the keys together: weights are the shares of each part in the sum of exponentials."""
    (out_a, lse_a), (out_b, lse_b) = one, other
    share = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    merged = torch.lerp(out_a.to(share.dtype), out_b.to(share.dtype), share)
    return merged.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)
