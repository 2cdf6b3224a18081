"""Attention with a given mask, and ways to apply a boolean mask."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tables import named_cases

LENGTH, HEAD = 9, 4
INF = float("inf")
MIN = torch.finfo(torch.float64).min
Mask: TypeAlias = "Callable[..., Tensor]"  # scores [B, H, T, T], and data that it depends on, to scores
Seen: TypeAlias = "Callable[..., Tensor]"  # indices of rows [T, 1] and of columns [1, T], and data, to a boolean mask

HIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = named_cases("ways to hide", globals(), "s, seen")
FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "boolean": lambda seen: seen,
    "additive": lambda seen: torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -INF),
}


def attention(mask: Mask) -> Callable[..., Tensor]:
    """Unfused attention of q, k, v [B, H, T, D], to a number."""

    def function(inputs: Tensor, *data: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD)
        out = torch.softmax(mask(scores, *data), -1) @ v
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=out.dtype)).sum()

    return function


def fused(mask: Callable[..., Tensor | None], **more: Any) -> Callable[..., Tensor]:
    """SDPA with a mask for `length` rows."""

    def function(inputs: Tensor, *data: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2], *data), **more)
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=out.dtype)).sum()

    return function


def under(way: str, seen: Seen) -> Callable[..., Tensor]:
    """Attention that hides the other keys in one of the ways."""
    if way in FUSED:
        return fused(lambda t, *data: FUSED[way](seen(rows(t), columns(t), *data)))
    return attention(lambda s, *data: HIDE[way](s, seen(rows(s.shape[-1]), columns(s.shape[-1]), *data)))


def qkv(batch: int = 2, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    """One tensor [3, B, H, T, D]: queries, keys and values of the same rows."""
    torch.manual_seed(seed)
    return [torch.randn(3, batch, 2, length, HEAD, dtype=torch.float64, requires_grad=True)]


def rows(t: int) -> Tensor:
    return torch.arange(t)[:, None]


def columns(t: int) -> Tensor:
    return torch.arange(t)[None, :]
