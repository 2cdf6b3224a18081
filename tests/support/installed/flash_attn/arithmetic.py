"""Attention as the package's kernels compute it: a causal mask ends at the last row and key, -1 is a window without an end."""

from typing import Any

import torch
from torch import Tensor

HEAD = 8  # the package pads heads to a multiple of this


def scores_of(q: Tensor, k: Tensor, scale: float, causal: bool, left: int = -1, right: int = -1, cap: float = 0.0) -> Tensor:
    """[h m n] of queries [m h d] and keys [n g d]; hidden ones are minus infinity."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    rows, keys = scores.shape[1:]
    delta = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= delta <= right if right >= 0 else True
    seen &= delta >= -left if left >= 0 else True
    return scores.masked_fill(~seen, float("-inf"))


def _wide(*items: Tensor) -> list[Tensor]:
    return [item.to(torch.promote_types(item.dtype, torch.float32)) for item in items]


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *how: Any) -> tuple[Tensor, Tensor]:
    """The result [m h d] and the log-sum-exp [h m] of one sequence; a row that sees no key has 0 and infinity."""
    dtype, (q, k, v) = q.dtype, _wide(q, k, v)
    scores = scores_of(q, k, scale, *how)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    value = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hmn,nhd->mhd", (scores - lse[..., None]).exp(), value).to(dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of one sequence, in single precision at least, and the sums [h m] that the package returns."""
    dout, q, k, v, out = _wide(dout, q, k, v, out)
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    key, value = (item.repeat_interleave(each, 1) for item in (k, v))
    scores, cap = scores_of(q, k, scale, *how), how[-1]
    weights = (scores - lse[..., None]).exp()
    delta = (dout * out).sum(-1).transpose(0, 1)
    inner = weights * (torch.einsum("mhd,nhd->hmn", dout, value) - delta[..., None]) * scale
    if cap:
        inner = inner * (1 - (scores / cap).masked_fill(scores == float("-inf"), 0.0).square())
    dq = torch.einsum("hmn,nhd->mhd", inner, key)
    dk = torch.einsum("hmn,mhd->nhd", inner, q).unflatten(1, (groups, each)).sum(2)
    dv = torch.einsum("hmn,mhd->nhd", weights, dout).unflatten(1, (groups, each)).sum(2)
    return dq, dk, dv, delta
