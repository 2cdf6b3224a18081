"""A decoder of equal layers, for reports and figures of whole steps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 50, 16
outside_of_graphs = torch._dynamo.disable(lambda embed, ids: embed(ids))


class Block(nn.Module):
    """Causal attention and an MLP; a block that sorts rows has no attention, and cannot stream."""

    def __init__(self, width: int = WIDTH, kind: str = "") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "breaks":
            torch._dynamo.graph_break()
        if self.kind == "sorts":
            return x + self.down(F.gelu(self.up(x)).erf().sort(1)[0])
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Layered(nn.Module):
    """Blocks, and a head with the loss of each next token.

    A tied head has the embedding's weight. A block that breaks is a graph.
    """

    def __init__(self, layers: int = 2, width: int = WIDTH, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.layers = nn.ModuleList([Block(width, kind) for _ in range(layers)])
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = outside_of_graphs(self.embed, ids) if self.kind == "breaks" else self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
