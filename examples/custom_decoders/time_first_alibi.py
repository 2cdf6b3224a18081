"""Time first, as in fairseq: [T, B, D] throughout, einsum, ALiBi slopes in place of positions, a squared ReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

if __package__:
    from .running import VOCABULARY, show, tokens
else:
    from running import VOCABULARY, show, tokens


class AlibiLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(width, heads, width // heads) / width**0.5) for _ in range(3))
        self.o = nn.Parameter(torch.randn(heads, width // heads, width) / width**0.5)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (einsum("tbd,dhe->tbhe", y, weight) for weight in (self.q, self.k, self.v))
        position = torch.arange(len(x), device=x.device)
        distance = position[None, :] - position[:, None]
        scores = einsum("ibhe,jbhe->bhij", q, k) * q.shape[-1] ** -0.5 + self.slopes[:, None, None] * distance
        weights = scores.masked_fill(distance > 0, -torch.inf).softmax(-1)
        x = x + einsum("bhij,jbhe,hed->ibd", weights, v, self.o)
        out: Tensor = x + self.down(F.relu(self.up(self.norm2(x))).square())
        return out


class TimeFirst(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList(AlibiLayer(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [T, B] to the loss."""
        x = self.embedding(ids[:-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        z_loss = 1e-4 * logits.logsumexp(-1).square().mean()
        return F.cross_entropy(logits.flatten(0, 1), ids[1:].flatten()) + z_loss


def example(length: int = 512) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return TimeFirst(), (tokens(length).T.contiguous(),)


if __name__ == "__main__":
    model, inputs = example()
    show(model, *inputs)  # torch.compile(model, backend="streambp")
