"""Attention in plain operators, for what no fused kernel takes, and how heads that share their keys are counted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class BottomRightCausal:
    """Later keys are hidden so that the last query sees the last key; hidden are also those more than `left` before its own."""

    left: int | None = None


@dataclass(frozen=True)
class Varlen:
    """Rows and keys of documents that lie one after the other: rows `rows[i] .. rows[i + 1]` see keys `keys[i] .. keys[i + 1]`:
    all of them or, where it is `causal`, as they do with `Last(left)` if there are no others.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    left: int | None = None


LAST: Final = BottomRightCausal()
Causal: TypeAlias = bool | BottomRightCausal | Varlen
"""Whether later keys are hidden: with True query i sees keys 0 .. i; with LAST the last query sees all, as the last rows do."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Result [b h m e] and log-sum-exp [b h m]; a row that sees no key has the result 0. Half types are computed in float32."""
    dtype, (query, key, value) = query.dtype, _wide(query, key, value)
    key, value = (for_all_heads(item, query) for item in (key, value))
    scores = _scores(query, key, bias, causal, scale)
    lse = scores.logsumexp(-1)
    return (_weights(scores, lse) @ value).to(dtype), lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    dtype, (gradient, query, key, value, out) = query.dtype, _wide(gradient, query, key, value, out)
    keys, values = (for_all_heads(item, query) for item in (key, value))
    weights = _weights(_scores(query, keys, bias, causal, scale), lse)
    inner = weights * (gradient @ values.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)) * _scale(query, scale)
    dk, dv = inner.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    made = inner @ keys, for_groups(dk, key.shape[1]), for_groups(dv, value.shape[1])
    dq, dk, dv = (item.to(dtype) for item in made)
    return dq, dk, dv


def _wide(*items: Tensor) -> list[Tensor]:
    return [item.to(torch.promote_types(item.dtype, torch.float32)) for item in items]


def triangle(query: Tensor, key: Tensor, causal: Causal) -> Tensor:
    """A bias that hides later keys, those before a window, and those of other documents."""
    if isinstance(causal, Varlen):
        return _documents(query, causal)
    past = key.shape[2] - query.shape[2] if isinstance(causal, BottomRightCausal) else 0
    hidden = query.new_full((query.shape[2], key.shape[2]), float("-inf"))
    bias = hidden.triu(1 + past)
    if isinstance(causal, BottomRightCausal) and causal.left is not None:
        bias = bias + hidden.tril(past - causal.left - 1)
    return bias.expand(1, 1, -1, -1)


def _documents(query: Tensor, seen: Varlen) -> Tensor:
    bias = query.new_full((seen.rows[-1], seen.keys[-1]), float("-inf"))
    for (start, stop), (first, end) in zip(pairwise(seen.rows), pairwise(seen.keys), strict=True):
        own, keys = query[:, :, start:stop], query.new_empty(1, 1, end - first, 1)
        bias[start:stop, first:end] = triangle(own, keys, BottomRightCausal(seen.left)) if seen.causal else 0.0
    return bias.expand(1, 1, -1, -1)


def for_all_heads(heads: Tensor, query: Tensor) -> Tensor:
    """Keys or values [b g n d], repeated for the h queries' heads."""
    return heads if heads.shape[1] == query.shape[1] else heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)


def for_groups(gradient: Tensor, groups: int) -> Tensor:
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: Causal, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * _scale(query, scale)
    scores = scores if bias is None else scores + bias
    return scores + triangle(query, key, causal) if causal else scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Shares of the keys; no key has one in a row that sees none."""
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
