"""Attention in plain operators, for operands that no fused kernel supports."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from streamfx.kernels.attention_call import (
    AttentionCall,
    BottomRightCausal,
    Causal,
    Gradients,
    Result,
    Varlen,
    for_all_heads,
    for_groups,
)


def forward(call: AttentionCall) -> Result:
    """Return the output and log-sum-exp. The output of a row without visible keys is 0. Half dtypes are computed in float32."""
    query, key, value = _to_float32(*call[:3])
    heads = for_all_heads(call._replace(query=query, key=key, value=value))
    scores = _scores(heads)
    lse = scores.logsumexp(-1)
    return (_weights(scores, lse) @ heads.value).to(call.query.dtype), lse


def backward(call: AttentionCall, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return (dq, dk, dv)."""
    query, key, value, gradient, out = _to_float32(*call[:3], gradient, out)
    heads = for_all_heads(call._replace(query=query, key=key, value=value))
    weights = _weights(_scores(heads), lse)
    dweights = gradient @ heads.value.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)
    dscores = weights * dweights * _scale(heads)
    dk, dv = dscores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    gradients = dscores @ heads.key, for_groups(dk, key.shape[1]), for_groups(dv, value.shape[1])
    dq, dk, dv = (result.to(call.query.dtype) for result in gradients)
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


def _scale(call: AttentionCall) -> float:
    """Return the scale of the scores; by default the inverse square root of the width."""
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


def _scores(call: AttentionCall) -> Tensor:
    """Return the scaled scores with bias and causal mask added."""
    scores = call.query @ call.key.transpose(-1, -2) * _scale(call)
    scores = scores if call.bias is None else scores + call.bias
    return scores + causal_bias(call.query, call.key, call.causal) if call.causal else scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax of scores [b h m n] with their log-sum-exp [b h m]; it is zero in a row without visible keys."""
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
