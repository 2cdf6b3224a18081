"""Loops over blocks of rows beside what is made for all blocks at once, and loops over the rows that are left: as xLSTM's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from tests.support.decoders import VOCABULARY, Decoder, Heads
from tests.support.exactness import compare
from tests.support.spread import only

BLOCK = 4


class MemoryHeads(Heads):
    """A state goes from block to block, then from row to row; inside of a block rows meet at once."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = q.shape[2] // BLOCK
        whole = count * BLOCK
        a, b, c = (part[:, :, :whole].contiguous() for part in (q, k, v))
        width = q.shape[-1]
        state = q.new_zeros(*q.shape[:2], width, v.shape[-1])
        states = q.new_zeros(*q.shape[:2], (count + 1) * width, v.shape[-1])
        for i, start in enumerate(range(0, whole, BLOCK)):
            states[:, :, i * width : (i + 1) * width] = state
            state = state * 0.5 + b[:, :, start : start + BLOCK].mT @ c[:, :, start : start + BLOCK]
        states[:, :, -width:] = state
        before = states[:, :, :-width].view(*q.shape[:2], count, width, -1)
        a, b, c = (part.view(*part.shape[:2], count, BLOCK, -1) for part in (a, b, c))
        made = (a @ b.mT).tril() @ c + a @ before
        return torch.cat(
            [made.flatten(2, 3), *self.rest(q[:, :, whole:], k[:, :, whole:], v[:, :, whole:], states[:, :, -width:])], 2
        )

    def rest(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> list[Tensor]:
        made = []
        for row in range(q.shape[2]):
            state = state * 0.9 + k[:, :, row, :, None] * v[:, :, row, None]
            made.append((q[:, :, row, None] @ state)[:, :, 0])
        return [torch.stack(made, 2)] if made else []


class Memory(Decoder):
    attention = MemoryHeads


def batch(length: int) -> dict[str, Tensor]:
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return {"ids": ids, "labels": labels}


def test_two_blocks_and_rows_behind_them() -> None:
    """Both loops stream, from states that are made between them."""
    report = compare(Memory().double(), batch(11), also=(1, 7, 64))
    sequence = known(known(report.facts[0].found_axes).sequence)
    assert sequence.length == 11 and sequence.granule == BLOCK


@pytest.mark.parametrize("length", only([15], [8, 12, 13, 15, 23]))
def test_other_numbers_of_blocks(length: int) -> None:
    """Exact, whatever streams."""
    compare(Memory().double(), batch(length), also=(1, 7, 64), streams=None)


class Square(nn.Module):
    """Blocks as long as they are wide, scaled by one table along both: features of one block are numbered as rows of another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out, self.qkv = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.table = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        h = h + torch.cat([part * self.table[:, None] * self.table for part in h.split(len(self.table), 1)], 1)
        q, k, v = self.qkv(h)[:, None].chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return self.out(h).square().mean() + h[..., 0].cos().mean()


def test_a_gradient_with_two_dimensions_of_the_sequence_is_not_scaled() -> None:
    """It was cut along both, and did not fit into its place."""
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    compare(Square(6).double(), {"x": x}, chunk_size=5, also=(1, 3, 6, 7), streams=None)
