"""Decoders whose rows see a few rows before them, spelled out and fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.decoders.parts import Decoder, Heads
from tests.support.decoders.spelled import SpelledHeads


class WindowHeads(SpelledHeads):
    """Each row sees itself and the four before it."""

    window = 5

    def mask(self, scores: Tensor) -> Tensor:
        row = torch.arange(scores.shape[-2], device=scores.device)[:, None]
        column = torch.arange(scores.shape[-1], device=scores.device)[None, :]
        visible = (column <= row) & (row - column < self.window)
        return torch.where(visible, scores, torch.tensor(float("-inf"), dtype=scores.dtype, device=scores.device))


class Window(Decoder):
    attention = WindowHeads


class FusedWindowHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2], device=q.device)
        delta = position[None, :] - position[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(delta <= 0) & (delta > -WindowHeads.window))


class FusedWindow(Decoder):
    attention = FusedWindowHeads
