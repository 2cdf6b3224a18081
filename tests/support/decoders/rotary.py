"""Decoders with rotary positions: as complex numbers from a table, and as rotated halves made per call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.decoders.parts import HEAD, Decoder, Heads


def complex_rotary(length: int, width: int, dtype: torch.dtype) -> Tensor:
    frequency = 1.0 / 100 ** (torch.arange(0, width, 2, dtype=dtype) / width)
    angle = torch.outer(torch.arange(length, dtype=dtype), frequency)
    return torch.polar(torch.ones_like(angle), angle)


class ComplexHeads(Heads):
    """Rotary positions as a product of complex numbers; the table is a buffer."""

    rotary: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotary", complex_rotary(64, HEAD, torch.float64))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turn = self.rotary[: q.shape[2]]
        q, k = (self.turned(x, turn) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def turned(x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)


class ComplexRope(Decoder):
    attention = ComplexHeads


class HalfRopeHeads(Heads):
    """Rotary positions by rotating halves, the tables made per call."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        frequency = 1.0 / 100 ** (torch.arange(0, HEAD, 2, dtype=q.dtype, device=q.device) / HEAD)
        angle = torch.arange(q.shape[2], dtype=q.dtype, device=q.device)[:, None] * frequency
        cos, sin = (torch.cat((part, part), -1) for part in (angle.cos(), angle.sin()))
        q, k = (x * cos + self.turned(x) * sin for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


class HalfRope(Decoder):
    attention = HalfRopeHeads
