"""Fourier transforms, pools and diagonals of features stream; along the sequence they run whole, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.exactness import compare

POOLED = "pools in one piece: windows that lie side by side stream"
VOCABULARY, WIDTH, LENGTH = 13, 8, 23
Mix = Callable[[Tensor], Tensor]


class Decoder(nn.Module):
    """One layer of attention, and what is mixed in behind it."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.mix = mix

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return F.cross_entropy(self.head(x + self.mix(x)).flatten(0, 1), labels.flatten())


def filtered(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=-1, norm="ortho")
    return torch.fft.irfft(spectrum * torch.arange(spectrum.shape[-1]), n=WIDTH, dim=-1, norm="ortho")


def images(x: Tensor) -> Tensor:
    """Features as images of 2 x 4."""
    pooled = F.avg_pool2d(x.unflatten(-1, (2, 4)).flatten(0, 1)[:, None], 2)
    return pooled.flatten(1).unflatten(0, x.shape[:2]).repeat(1, 1, 4)


def along_sequence(x: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
    return pool(x.transpose(1, 2)).transpose(1, 2)


class Normed(nn.Module):
    """Heads of all rows in one batch, normed as groups, as RWKV-7 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.flatten(0, 1))
        return normed.view_as(x)


STREAM: dict[str, Mix] = {
    "the real part of a transform": lambda x: torch.fft.fft(x, dim=-1).real,
    "a filter": filtered,
    "means of pairs of features": lambda x: F.avg_pool1d(x, 2).repeat_interleave(2, -1),
    "features left over": lambda x: F.avg_pool1d(x, 3).repeat_interleave(4, -1),
    "images": images,
    "a norm of groups": Normed(),
    "means of blocks of rows": lambda x: along_sequence(x, lambda y: F.avg_pool1d(y, 5)).square().mean(1, keepdim=True),
    "means of windows of rows": lambda x: along_sequence(F.pad(x, (0, 0, 2, 0)), lambda y: F.avg_pool1d(y, 3, 1)),
    "the largest of windows of rows": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).amax(-1),
    "a diagonal": lambda x: (x[..., :, None] * x[..., None, :]).diagonal(0, -2, -1),
    "a matrix of a diagonal": lambda x: torch.diag_embed(x).sin().sum(-1),
    "a diagonal above": lambda x: F.pad((x[..., :, None] * x[..., None, :]).diagonal(1, -1, -2), (0, 1)),
}
RUN_WHOLE: dict[str, tuple[Mix, str]] = {
    "windows that reach beyond an end": (lambda x: along_sequence(x, lambda y: F.avg_pool1d(y, 3, 1, 1)), POOLED),
    "windows in steps": (
        lambda x: along_sequence(x, lambda y: F.avg_pool1d(y, 5, 2)).mean(1, keepdim=True),
        POOLED,
    ),
    "windows of sizes of their own": (
        lambda x: along_sequence(x, lambda y: F.adaptive_avg_pool1d(y, 4)).mean(1, keepdim=True),
        POOLED,
    ),
    "means up to the end": (
        lambda x: along_sequence(x, lambda y: F.avg_pool1d(y, 5, ceil_mode=True)).mean(1, keepdim=True),
        POOLED,
    ),
    "the largest of windows": (
        lambda x: along_sequence(F.pad(x, (0, 0, 2, 0)), lambda y: F.max_pool1d(y, 3, 1)),
        "stream as x.unfold(dim, size, 1).amax(-1)",
    ),
    "a diagonal of rows": (lambda x: x[:, :WIDTH].diagonal(0, 1, 2).sum() * x, "diagonal.default mixes the rows of the sequence"),
    "memory in another order": (
        lambda x: (2 * x).as_strided((2, LENGTH, WIDTH), (LENGTH * WIDTH, 1, LENGTH)),
        "aten.as_strided.default reads memory",
    ),
    "memory of other rows": (
        lambda x: F.pad((2 * x).as_strided((2, LENGTH - 1, WIDTH), (LENGTH * WIDTH, WIDTH, 1), WIDTH), (0, 0, 1, 0)),
        "aten.as_strided.default reads memory",
    ),
    "a transform of rows": (lambda x: torch.fft.rfft(x, dim=1).abs().mean(1, keepdim=True), "mixes the rows of the sequence"),
}


def reasons(mix: Mix, **how: Any) -> set[str]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    report = compare(Decoder(mix).double(), {"ids": ids, "labels": ids}, streams=None, **how)
    return {reason for facts in report.facts for reason in facts.reasons()}


@pytest.mark.parametrize("name", STREAM)
def test_what_mixes_features(name: str) -> None:
    assert not reasons(STREAM[name])


@pytest.mark.parametrize("name", RUN_WHOLE)
def test_what_mixes_rows(name: str) -> None:
    mix, why = RUN_WHOLE[name]
    assert any(why in reason for reason in reasons(mix))
