"""Buffers that a step reads and then writes to: the backward half has the values that were read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.exactness import compare

LENGTH, WIDTH, VOCABULARY = 21, 8, 11
Step = Callable[["Decoder", Tensor], Tensor]


class Decoder(nn.Module):
    """Two layers of attention and a head; `step` stands between, and writes to a buffer or to a weight that is not trained."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step: Any = step
        self.embed, self.head, self.qkv = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
            nn.Linear(WIDTH, 3 * WIDTH),
        )
        self.code: Tensor
        self.cache: Tensor
        self.count: Tensor
        self.mean = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("code", torch.randn(WIDTH, WIDTH))
        self.register_buffer("cache", torch.zeros(2, 2 * LENGTH, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.double()

    def layer(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.step(self, self.layer(self.embed(ids))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def averaged(self: Decoder, x: Tensor) -> Tensor:
    y = x @ self.code.clone()
    with torch.no_grad():
        self.code.mul_(0.9).add_((x.transpose(1, 2) @ x).mean(0), alpha=0.1)
    return y + x @ self.code


def quantized(self: Decoder, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.flatten(0, 1), self.code).argmin(-1)
    chosen = F.embedding(nearest, self.code).view_as(x)
    with torch.no_grad():
        counts = F.one_hot(nearest, WIDTH).to(x.dtype)
        self.code.mul_(0.9).add_(counts.T @ x.flatten(0, 1), alpha=0.1)
    return x + (chosen - x).detach() + 0.1 * (x - chosen) ** 2


def written_twice(self: Decoder, x: Tensor) -> Tensor:
    y = x @ self.code.clone()
    self.code.mul_(0.5)
    z = y @ self.code.clone()
    self.code.t().add_(x.detach().mean())
    return z @ self.code


def written_by_slice(self: Decoder, x: Tensor) -> Tensor:
    y = x @ self.code.t().clone()
    self.code[2:5] = x[0, :3].detach()
    return y * self.code[0].clone() + x @ self.code


def cached(self: Decoder, x: Tensor) -> Tensor:
    seen = x * self.cache[:, :LENGTH].clone()
    self.cache[:, :LENGTH] = x.detach()
    return x + seen + (x @ self.cache.transpose(1, 2)) @ self.cache


def averaged_weight(self: Decoder, x: Tensor) -> Tensor:
    y = x @ self.mean.clone()
    with torch.no_grad():
        self.mean.lerp_(self.qkv.weight[:WIDTH], 0.1)
    return y


def counted(self: Decoder, x: Tensor) -> Tensor:
    y = x * (self.count + 1)
    self.count.add_(1)
    return y


def normed(self: Decoder, x: Tensor) -> Tensor:
    return x + self.norm(x.flatten(0, 1)).view_as(x)


STEPS = (averaged, quantized, written_twice, written_by_slice, cached, averaged_weight, counted, normed)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_backward_half_has_what_was_read(step: Step) -> None:
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    model = Decoder(step)
    compare(model, {"ids": ids}, chunk_size=8, streams=None)
