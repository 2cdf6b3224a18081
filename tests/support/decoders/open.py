"""Attention that is not causal: encoders, and a decoder that looks into a memory."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.decoders.fused import CausalHeads
from tests.support.decoders.parts import HEAD, HEADS, VOCABULARY, WIDTH, Decoder, Heads, loss_of
from tests.support.decoders.spelled import SpelledHeads


class OpenHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Bidirectional(Decoder):
    """An encoder: every row sees every row; the loss is on given labels."""

    attention: type[nn.Module] = OpenHeads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).transpose(1, 2), labels)


class OpenSpelledHeads(SpelledHeads):
    def mask(self, scores: Tensor) -> Tensor:
        return scores


class BidirectionalSpelled(Bidirectional):
    attention = OpenSpelledHeads


class CrossAttention(nn.Module):
    """A causal decoder that also looks into a memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCABULARY, WIDTH), CausalHeads()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, memory: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(self.norm(x))
        q, k, v = (
            p(s).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for p, s in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return loss_of(self.head(x), labels)
