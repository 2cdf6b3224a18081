"""Decoders of a few operators each, written out for golden files: every line of them shows in the text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import Facts
from streamfx.tools.inspect.tracing import traced
from streamfx.tools.report.printer import text_of

VOCABULARY, WIDTH = 11, 4


class Causal(nn.Module):
    """One layer of fused causal attention with one head, and a head with a loss: [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (project(x)[:, None] for project in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Padded(nn.Module):
    """Layers of fused causal attention with a padding mask: [B, T, D] and [B, T]."""

    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(layers, width, width) / math.sqrt(width))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        visible = (position <= position[:, None]) & keep[:, None, None]
        for w in self.w:
            q = (x @ w)[:, None]
            x = x + F.scaled_dot_product_attention(q, q, x[:, None], attn_mask=visible)[:, 0]
        return x


class Streams(nn.Module):
    """Two streams that feed each other through two unfused attentions over a window of three, unbatched: [T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(x.shape[0])
        delta = position[:, None] - position
        hidden = (delta < 0) | (delta >= 3)
        for w in self.w:
            weights = torch.softmax((y @ w @ y.T).masked_fill(hidden, -torch.inf), -1)
            x, y = y, x + weights @ y
        return x, y


class Mixing(nn.Module):
    """Attention that sees everything, after a running maximum over the sequence that has no rows to itself: [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sort(self.up(x), dim=1).values
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]).square().mean()


@dataclass(frozen=True)
class Example:
    """A decoder, its arguments and the options to compile it with."""

    model: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Any, ...]]
    chunk_size: int

    def facts(self) -> Facts:
        """Return the facts of its graph."""
        model, options = self.model(), {"chunk_size": self.chunk_size, "loss_chunk_size": self.chunk_size, "outputs": "dense"}
        (graph,) = traced(model, self.arguments(), {}, options).graphs
        return graph.facts

    def texts(self) -> dict[str, str]:
        """Return the text of the facts after each pass."""
        found: dict[str, str] = {}

        def noted(step: Any, facts: Facts) -> None:
            found[step.name] = text_of(facts, step.name)

        with mock.patch("streamfx.frontend.backend.show_product", noted):
            self.facts()
        return found


def tokens(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).view(batch, length) % VOCABULARY


def ramp(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).view(shape)


EXAMPLES = {
    "causal": Example(Causal, lambda: (tokens(2, 6), tokens(2, 6)), 4),
    "padded": Example(Padded, lambda: (ramp(2, 6, WIDTH), torch.ones(2, 6, dtype=torch.bool)), 4),
    "streams": Example(Streams, lambda: (ramp(7, WIDTH), -ramp(7, WIDTH)), 3),
    "mixing": Example(Mixing, lambda: (torch.ones(2, 5, WIDTH, requires_grad=True),), 2),
}
