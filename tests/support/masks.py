"""Attention under a mask that a test brings, and positions to write masks with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH, HEAD = 9, 4
INF = float("inf")
Mask: TypeAlias = "Callable[..., Tensor]"  # scores [B, H, T, T], and data that it depends on, to scores


def attention(mask: Mask) -> Callable[..., Tensor]:
    """Spelled-out attention of q, k, v [B, H, T, D], to a number."""

    def function(inputs: Tensor, *data: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD)
        out = torch.softmax(mask(scores, *data), -1) @ v
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=out.dtype)).sum()

    return function


def fused(mask: Callable[..., Tensor], **more: Any) -> Callable[..., Tensor]:
    """SDPA with the mask made for `length` rows."""

    def function(inputs: Tensor, *data: Tensor) -> Tensor:
        q, k, v = inputs.unbind()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2], *data), **more)
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=out.dtype)).sum()

    return function


def qkv(batch: int = 2, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    """One tensor [3, B, H, T, D]: queries, keys and values of the same rows."""
    torch.manual_seed(seed)
    return [torch.randn(3, batch, 2, length, HEAD, dtype=torch.float64, requires_grad=True)]


def rows(t: int) -> Tensor:
    return torch.arange(t)[:, None]


def columns(t: int) -> Tensor:
    return torch.arange(t)[None, :]
