"""Sample calls of fused attention: b batches, two heads, t queries, k keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from tests.support.samples.registry import Sizes, sample


def attention_inputs(s: Sizes, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return s.draw(s.b, 2, s.t, 4), s.draw(s.b, heads, s.k, 4), s.draw(s.b, heads, s.k, 4)


@sample(ATTENTION)
def open_attention(s: Sizes) -> tuple[Any, ...]:
    return attention_inputs(s)


@sample(ATTENTION)
def causal_attention(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"scale": 0.3, "is_causal": True}


@sample(ATTENTION)
def grouped_attention(s: Sizes) -> tuple[Any, ...]:
    return attention_inputs(s, heads=1)


@sample(ATTENTION)
def masked_attention(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"attn_mask": s.draw(s.b, 1, s.t, s.k)}


@sample(ATTENTION)
def causal_and_masked_attention(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"attn_mask": s.draw(s.t, s.k), "is_causal": True}


@sample(ATTENTION)
def attention_masked_by_key(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"attn_mask": s.draw(s.b, 1, 1, s.k)}


def backward_inputs(inputs: tuple[Tensor, Tensor, Tensor], s: Sizes, causal: bool, **kwargs: Any) -> tuple[Any, ...]:
    kwargs["is_causal"] = causal
    out, lse = ATTENTION(*inputs, **kwargs)
    return s.draw(*out.shape), *inputs, out, lse, kwargs


@sample(ATTENTION_BACKWARD)
def open_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s), s, False, scale=0.3)


@sample(ATTENTION_BACKWARD)
def causal_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s), s, True, scale=0.5)


@sample(ATTENTION_BACKWARD)
def grouped_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s, heads=1), s, False, scale=0.5)


@sample(ATTENTION_BACKWARD)
def masked_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s), s, False, attn_mask=s.draw(s.b, 1, s.t, s.k))
