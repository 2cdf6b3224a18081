"""Tiny decoders. `forward` takes ids and labels and returns a loss."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.decoders.parts import HEAD, HEADS, VOCABULARY, WIDTH, Decoder, Heads, Plain, SwiGLU, loss_of, made

__all__ = ["HEAD", "HEADS", "VOCABULARY", "WIDTH", "Decoder", "Heads", "Plain", "SwiGLU", "loss_of", "made"]

INF = float("inf")


class MaskedHeads(Heads):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self.mask = mask
        return super().forward(x)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class GivenMask(Decoder):
    """The mask [B, 1, T, T] is an input."""

    attention = MaskedHeads

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return loss_of(self.logits(ids, mask=mask), labels)


class UnfusedHeads(Heads):
    """Matmuls and a softmax; subclasses write the mask in other ways."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mask(q @ k.transpose(-2, -1) / math.sqrt(HEAD))
        return torch.softmax(scores, dim=-1) @ v

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        hidden = torch.triu(torch.ones(t, t, dtype=torch.bool, device=scores.device), diagonal=1)
        return scores.masked_fill(hidden, -INF)


class Triangle(Decoder):
    attention = UnfusedHeads


class WindowHeads(UnfusedHeads):
    """Each row sees itself and the four before it."""

    window = 5

    def mask(self, scores: Tensor) -> Tensor:
        row = torch.arange(scores.shape[-2], device=scores.device)[:, None]
        column = torch.arange(scores.shape[-1], device=scores.device)[None, :]
        visible = (column <= row) & (row - column < self.window)
        return torch.where(visible, scores, torch.tensor(-INF, dtype=scores.dtype, device=scores.device))


class Window(Decoder):
    attention = WindowHeads


class HalfRopeHeads(Heads):
    """Rotary positions by rotating halves, the tables made per call."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        frequency = 1.0 / 100 ** (torch.arange(0, HEAD, 2, dtype=q.dtype, device=q.device) / HEAD)
        angle = torch.arange(q.shape[2], dtype=q.dtype, device=q.device)[:, None] * frequency
        cos, sin = (torch.cat((part, part), -1) for part in (angle.cos(), angle.sin()))
        q, k = (x * cos + self.turned(x) * sin for x in (q, k))
        return super().mix(q, k, v)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


class HalfRope(Decoder):
    attention = HalfRopeHeads


class CrossAttention(nn.Module):
    """A causal decoder that also looks into a memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCABULARY, WIDTH), Heads()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, memory: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(self.norm(x))
        projected = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (p.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for p in projected)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return loss_of(self.head(x), labels)
