"""Loops over blocks of rows beside what is made for all blocks at once, and loops over the rows that are left: as xLSTM's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from streamfx.runtime.chunked_recurrences import Recurrence
from tests.support.decoders import VOCABULARY, Decoder, Heads
from tests.support.exactness import Report, compare
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


class MarkedHeads(Heads):
    """As xLSTM's: the states lie side by side in buffers, one number for each block in another; the largest so far divides."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, rows, width = q.shape
        count = rows // BLOCK
        state, mark = q.new_zeros(batch, heads, width, width), q.new_zeros(batch, heads)
        states, marks = q.new_zeros(batch, heads, (count + 1) * width, width), q.new_zeros(batch, heads, count + 1)
        a, b, c = (part.reshape(batch, heads, count, BLOCK, width) for part in (q, k, v))
        gates, largest = b.sum(-1).cumsum(-1), b.sum(-1).amax(-1)
        for i in range(count):
            states[:, :, i * width : (i + 1) * width], marks[:, :, i] = state, mark
            own = k[:, :, i * BLOCK : (i + 1) * BLOCK]
            following = torch.max(gates[:, :, i, -1] + mark, largest[:, :, i])
            shrunk = torch.exp(gates[:, :, i, -1] + mark - following - 3)
            state = shrunk[..., None, None] * state + own.mT @ v[:, :, i * BLOCK : (i + 1) * BLOCK]
            mark = following
        states[:, :, -width:], marks[:, :, -1] = state, mark
        before = states[:, :, :-width].view(batch, heads, count, width, width)
        made = ((a @ b.mT).tril() @ c + a @ before) / (1 + marks[:, :, :-1, None, None].square())
        return made.flatten(2, 3)


class Marked(Decoder):
    attention = MarkedHeads


def batch(length: int) -> dict[str, Tensor]:
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return {"ids": ids, "labels": labels}


def test_two_blocks_and_rows_behind_them() -> None:
    """Both loops stream, from states that are made between them."""
    report = compare(Memory().double(), batch(11), also=(1, 7, 64))
    sequence = known(known(report.facts[0].found_axes).sequence)
    assert sequence.length == 11 and sequence.granule == BLOCK


@pytest.mark.parametrize("length", only([15, 23], [8, 12, 15, 23, 31]))
def test_other_numbers_of_blocks(length: int) -> None:
    """Three blocks and three rows are two loops, though both have three steps."""
    report = compare(Memory().double(), batch(length), also=(1, 4, 7, 64))
    blocks, rest = divmod(length, BLOCK)
    assert loops_of(report) == 2 * 2 * ((blocks > 2) + (rest > 2)), "one for each half of each layer"


@pytest.mark.parametrize("length", only([14], [13, 14, 22]))
def test_one_or_two_rows_behind_blocks(length: int) -> None:
    """No loop, and no rows of the sequence: what they are read by runs whole."""
    compare(Memory().double(), batch(length), also=(1, 4, 64), streams=False)


@pytest.mark.parametrize("length", only([12, 20], [8, 12, 20, 32]))
def test_numbers_that_go_from_block_to_block(length: int) -> None:
    report = compare(Marked().double(), batch(length), also=(1, 3, 4, 9, 64))
    assert loops_of(report) == (4 if length > 8 else 0)


class LinearHeads(Heads):
    """The backward half needs rows of the sequence again, and nothing that the forward half's steps have made."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, b, c = (part.reshape(-1, part.shape[2] // BLOCK, BLOCK, part.shape[-1]) for part in (q, k, v))
        state, states = a.new_zeros(len(a), a.shape[-1], a.shape[-1]), []
        for i in range(a.shape[1]):
            states.append(state)
            state = 0.9 * state + b[:, i].mT @ c[:, i]
        return (a @ torch.stack(states, 1) + (a @ b.mT).tril() @ c).view(q.shape)


class Linear(Decoder):
    attention = LinearHeads


def test_rows_that_a_loop_goes_back_through() -> None:
    """Rows that a step of the backward half needs a step later are among the states of the loop that has read them."""
    report = compare(Linear().double(), batch(20), also=(1, 4, 9, 64))
    assert loops_of(report) == 4


@pytest.mark.long
def test_as_many_operators_for_any_number_of_blocks() -> None:
    """A loop that was traced block by block is one operator."""
    few, many = (compare(Marked().double(), batch(BLOCK * count), chunk_size=8).facts[0] for count in (6, 30))
    assert len(few.joint.nodes) == len(many.joint.nodes)


def test_two_blocks_are_no_loop() -> None:
    """They stay as they are written, and stream."""
    compare(Marked().double(), batch(8), also=(1, 3, 4, 64))


def test_forward_only() -> None:
    model, inputs = Marked().double(), batch(20)
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 8, "loss_chunk_size": 8, "strict": True})
    with torch.no_grad():
        assert abs(float(compiled(**inputs) - model(**inputs))) < 1e-12


def loops_of(report: Report) -> int:
    (facts,) = report.facts
    return sum(isinstance(node.target, Recurrence) for node in facts.joint.nodes)


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
