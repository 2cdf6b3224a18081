"""Decoders that spell attention out, each with another way to write a causal mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.decoders.parts import HEAD, HEADS, WIDTH, Decoder, Heads


class SpelledHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mask(q @ k.transpose(-2, -1) / math.sqrt(HEAD))
        return torch.softmax(scores, dim=-1) @ v

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        hidden = torch.triu(torch.ones(t, t, dtype=torch.bool, device=scores.device), diagonal=1)
        return scores.masked_fill(hidden, float("-inf"))


class Triangle(Decoder):
    attention = SpelledHeads


class AdditiveHeads(SpelledHeads):
    """`triu` of a matrix of minus infinities, added."""

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        return scores + torch.full((t, t), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)


class AdditiveTriangle(Decoder):
    attention = AdditiveHeads


class BufferHeads(SpelledHeads):
    """A registered `tril` buffer for the longest sequence, cut to size."""

    def __init__(self, longest: int = 48) -> None:
        super().__init__()
        self.tril: Tensor
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        return scores.masked_fill(self.tril[:, :, :t, :t] == 0, float("-inf"))


class TrilBuffer(Decoder):
    attention = BufferHeads


class AlibiHeads(SpelledHeads):
    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        position = torch.arange(t, device=scores.device)
        distance = position[None, :] - position[:, None]
        slopes = torch.tensor([2.0**-i for i in range(1, HEADS + 1)], dtype=scores.dtype, device=scores.device)
        biased = scores + slopes[:, None, None] * distance
        return biased.masked_fill(distance > 0, torch.finfo(scores.dtype).min)


class Alibi(Decoder):
    attention = AlibiHeads


class SoftcapHeads(SpelledHeads):
    def mask(self, scores: Tensor) -> Tensor:
        return super().mask(5.0 * torch.tanh(scores / 5.0))


class Softcap(Decoder):
    attention = SoftcapHeads

    def logits(self, ids: Tensor, **more: Any) -> Tensor:
        return 3.0 * torch.tanh(super().logits(ids, **more) / 3.0)


class EinsumHeads(nn.Module):
    """Weights [H, D, E]; everything in einsum, the result contracted over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.randn(HEADS, WIDTH, HEAD) * 0.3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) * HEAD**-0.5
        keep = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
        weights = scores.masked_fill(~keep, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bhke,hde->bqd", weights, v, self.wo)


class Einsum(Decoder):
    attention = EinsumHeads
