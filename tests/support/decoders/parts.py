"""Parts of decoders: norm, MLP, heads, the residual stream, and the loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 19, 12, 2
HEAD = WIDTH // HEADS


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The next token's cross entropy over [B, T, V] and [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


class Decoder(nn.Module):
    """[B, T, D] and pre-norm; the subclasses say how attention is written."""

    attention: type[nn.Module]

    def __init__(self, layers: int = 2, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.attend = nn.ModuleList([self.attention() for _ in range(layers)])
        self.mlp = nn.ModuleList([SwiGLU() for _ in range(layers)])
        self.norms = nn.ModuleList([RMSNorm() for _ in range(2 * layers + 1)])
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        for i in range(len(self.attend)):
            x = self.layer(x, i, **more)
        normed: Tensor = self.norms[-1](x)
        return normed

    def layer(self, x: Tensor, i: int, **more: Any) -> Tensor:
        x = x + self.attend[i](self.norms[2 * i](x), **more)
        mixed: Tensor = x + self.mlp[i](self.norms[2 * i + 1](x))
        return mixed

    def logits(self, ids: Tensor, **more: Any) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.embed(ids), **more))
        return logits

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.logits(ids), labels)


class Heads(nn.Module):
    """Projections to [B, H, T, D] and back; `mix` is the attention proper, causal where a subclass does not say otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (project(x).view(b, t, HEADS, HEAD).transpose(1, 2) for project in (self.q, self.k, self.v))
        out: Tensor = self.o(self.mix(q, k, v).transpose(1, 2).reshape(b, t, WIDTH))
        return out

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Plain(Decoder):
    """Fused attention that is causal by a flag."""

    attention = Heads


def made(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A decoder with its parameters drawn from a seed."""
    torch.manual_seed(seed)
    return make().to(dtype)
