"""Local and global layers in turn, as in Gemma: a sliding window, soft caps on scores and logits, norms on both sides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from .running import VOCABULARY, show, tokens
else:
    from running import VOCABULARY, show, tokens


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(4))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gated, self.down = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = capped(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, 50.0)
        row, column = (torch.arange(x.shape[1], device=x.device)[index] for index in ((..., None), (None, ...)))
        visible = column <= row
        if self.window is not None:
            visible = visible & (row - column < self.window)
        weights = torch.where(visible, scores, torch.finfo(scores.dtype).min).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        before, after, before_mlp, after_mlp = self.norms
        x = x + after(self.mixed(before(x)))
        gate, up = self.gated(before_mlp(x)).chunk(2, -1)
        out: Tensor = x + after_mlp(self.down(F.gelu(gate, approximate="tanh") * up))
        return out


class LocalAndGlobal(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4, window: int = 32) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(VOCABULARY, width), width**0.5
        self.layers = nn.ModuleList(Layer(width, heads, window if i % 2 == 0 else None) for i in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        logits = capped(F.linear(self.norm(x), self.embedding.weight) / self.scale, 30.0)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)


def example(length: int = 512) -> tuple[nn.Module, tuple[Tensor, ...]]:
    ids = tokens(length)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, : labels.shape[1] // 4] = -100  # a prompt, which is not learned
    return LocalAndGlobal(), (ids, labels)


if __name__ == "__main__":
    model, inputs = example()
    show(model, *inputs)  # torch.compile(model, backend="streambp")
