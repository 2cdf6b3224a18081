"""Attention in plain operators, for operands that no fused kernel supports, and helpers for heads that share keys.

Sizes: b batch, h query heads, g heads of keys and values (each shared by h / g query heads), m queries, n keys, d and e widths
of a head. `bias` is added to the scores [b h m n]; `scale` multiplies them, None: 1 / sqrt(d).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class BottomRightCausal:
    """A causal mask that is aligned at the last query and the last key.

    Unless `left` is None, a query also sees at most `left` keys before its own.
    """

    left: int | None = None


@dataclass(frozen=True)
class Varlen:
    """Consecutive documents: rows `rows[i] .. rows[i + 1]` see keys `keys[i] .. keys[i + 1]`.

    If `causal`, the rows see these keys as under `BottomRightCausal(left)`; otherwise they see all of them.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    left: int | None = None


BOTTOM_RIGHT: Final = BottomRightCausal()
Causal: TypeAlias = bool | BottomRightCausal | Varlen
"""False: all keys are visible. True: query i sees keys 0 .. i. BOTTOM_RIGHT: the last query sees all keys, each query before it
one fewer."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: Causal, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [b h m e] and log-sum-exp [b h m] of queries [b h m d], keys [b g n d] and values [b g n e].

    The output of a row without visible keys is 0. Half dtypes are computed in float32.
    """
    dtype, (query, key, value) = query.dtype, _to_float32(query, key, value)
    key, value = (for_all_heads(heads, query) for heads in (key, value))
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
    """Return (dq, dk, dv); `gradient` is the gradient of the output, `out` and `lse` are the results of `forward`."""
    dtype, (gradient, query, key, value, out) = query.dtype, _to_float32(gradient, query, key, value, out)
    keys, values = (for_all_heads(heads, query) for heads in (key, value))
    weights = _weights(_scores(query, keys, bias, causal, scale), lse)
    dscores = weights * (gradient @ values.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)) * _scale(query, scale)
    dk, dv = dscores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    gradients = dscores @ keys, for_groups(dk, key.shape[1]), for_groups(dv, value.shape[1])
    dq, dk, dv = (result.to(dtype) for result in gradients)
    return dq, dk, dv


def _to_float32(*values: Tensor) -> list[Tensor]:
    """Return the values in float32 if they have half dtypes, and otherwise unchanged."""
    return [value.to(torch.promote_types(value.dtype, torch.float32)) for value in values]


def causal_bias(query: Tensor, key: Tensor, causal: Causal) -> Tensor:
    """Return the mask as a bias [1 1 m n]: minus infinity for hidden keys, else 0.

    It hides the keys after a query, before its window, and of other documents. `causal` is True or a mask, not False.
    """
    if isinstance(causal, Varlen):
        return _document_bias(query, causal)
    past = key.shape[2] - query.shape[2] if isinstance(causal, BottomRightCausal) else 0
    hidden = query.new_full((query.shape[2], key.shape[2]), float("-inf"))
    bias = hidden.triu(1 + past)
    if isinstance(causal, BottomRightCausal) and causal.left is not None:
        bias = bias + hidden.tril(past - causal.left - 1)
    return bias.expand(1, 1, -1, -1)


def _document_bias(query: Tensor, documents: Varlen) -> Tensor:
    """Return a bias [1 1 m n]: minus infinity, but 0 for the keys of a row's own document that the mask inside it shows."""
    bias = query.new_full((documents.rows[-1], documents.keys[-1]), float("-inf"))
    for (start, stop), (first, end) in zip(pairwise(documents.rows), pairwise(documents.keys), strict=True):
        document_query, keys = query[:, :, start:stop], query.new_empty(1, 1, end - first, 1)
        bias[start:stop, first:end] = (
            causal_bias(document_query, keys, BottomRightCausal(documents.left)) if documents.causal else 0.0
        )
    return bias.expand(1, 1, -1, -1)


def for_all_heads(heads: Tensor, query: Tensor) -> Tensor:
    """Return keys or values [b g n d], repeated for the h heads of the queries."""
    return heads if heads.shape[1] == query.shape[1] else heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)


def for_groups(gradient: Tensor, groups: int) -> Tensor:
    """Return a gradient of keys or values [b h n d], summed over the query heads that share them: [b g n d]; `groups` is g."""
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


def _scale(query: Tensor, scale: float | None) -> float:
    """Return the scale of the scores; by default the inverse square root of the width."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: Causal, scale: float | None) -> Tensor:
    """Return the scaled scores with bias and causal mask added."""
    scores = query @ key.transpose(-1, -2) * _scale(query, scale)
    scores = scores if bias is None else scores + bias
    return scores + causal_bias(query, key, causal) if causal else scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax of scores [b h m n] with their log-sum-exp [b h m]; it is zero in a row without visible keys."""
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
