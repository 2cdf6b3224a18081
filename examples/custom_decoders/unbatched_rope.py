"""One sequence at a time, [T, D]: complex rotary embeddings, grouped queries, RMSNorm, a gated MLP, float32 loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from .running import VOCABULARY, show, tokens
else:
    from running import VOCABULARY, show, tokens


def rotations(length: int, width: int, device: torch.device) -> Tensor:
    """Unit complex numbers [T, width / 2]."""
    angles = torch.outer(torch.arange(length, device=device), 10000.0 ** (-torch.arange(0, width, 2, device=device) / width))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """[T, H, E], each pair of numbers turned as a complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, heads * size, bias=False), nn.Linear(width, 2 * groups * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((width, 160), (width, 160), (160, width)))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.norm1(x)
        q = rotated(self.q(y).unflatten(-1, (self.heads, -1)), turns)
        k, v = self.kv(y).unflatten(-1, (2, self.groups, -1)).unbind(-3)
        q, k, v = (item.transpose(0, 1)[None] for item in (q, rotated(k, turns), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed[0].transpose(0, 1).flatten(1))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Unbatched(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, groups) for _ in range(layers))
        self.norm, self.size = nn.RMSNorm(width), width // heads

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [T] to the loss."""
        x = self.embedding(ids)
        turns = rotations(len(ids), self.size, ids.device)
        for layer in self.layers:
            x = layer(x, turns)
        logits = F.linear(self.norm(x), self.embedding.weight).float()
        return F.cross_entropy(logits[:-1], ids[1:])


def example(length: int = 512) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Unbatched(), (tokens(length, batch=1)[0],)


if __name__ == "__main__":
    model, inputs = example()
    show(model, *inputs)  # torch.compile(model, backend="streambp")
