"""Several residual streams, a mixture of experts that every token passes, and a second head for the token after next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from .running import VOCABULARY, show, tokens
else:
    from running import VOCABULARY, show, tokens


class Experts(nn.Module):
    """Two of the experts count for a token; all are computed, and the others weigh nothing."""

    def __init__(self, width: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture, and a loss that asks for an even load."""
        shares = self.router(x).softmax(-1)
        best = shares.topk(self.chosen, -1)
        weights = torch.zeros_like(shares).scatter(-1, best.indices, best.values)
        weights = weights / weights.sum(-1, keepdim=True)
        inner = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        mixed = torch.einsum("btef,efd,bte->btd", inner, self.down, weights)
        load = (weights > 0).float().mean((0, 1))
        return mixed, (load * shares.mean((0, 1))).sum() * shares.shape[-1]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, streams: int) -> None:
        super().__init__()
        self.heads = heads
        self.read, self.write = nn.Parameter(torch.rand(2, streams)), nn.Parameter(torch.rand(2, streams))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out, self.experts = nn.Linear(width, 3 * width), nn.Linear(width, width), Experts(width, 4)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D, S] to the same, and the experts' loss."""
        x = self.norms[0](streams @ self.read[0].softmax(-1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        streams = streams + mixed[..., None] * self.write[0]
        mixed, load = self.experts(self.norms[1](streams @ self.read[1].softmax(-1)))
        return streams + mixed[..., None] * self.write[1], load


class ManyStreams(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, streams: int = 3) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, streams) for _ in range(layers))
        self.heads = nn.ModuleList(nn.Linear(width, VOCABULARY, bias=False) for _ in range(2))
        self.streams = streams

    def forward(self, ids: Tensor) -> Tensor:
        streams = self.embedding(ids)[..., None].expand(-1, -1, -1, self.streams)
        loss = torch.zeros((), device=ids.device)
        for layer in self.layers:
            streams, load = layer(streams)
            loss = loss + 0.01 * load
        x = self.norm(streams.mean(-1))
        for ahead, head in enumerate(self.heads, start=1):
            loss = loss + F.cross_entropy(head(x[:, :-ahead]).flatten(0, 1), ids[:, ahead:].flatten()) / ahead
        return loss


def example(length: int = 512) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ManyStreams(), (tokens(length),)


if __name__ == "__main__":
    model, inputs = example()
    show(model, *inputs)  # torch.compile(model, backend="streambp")
