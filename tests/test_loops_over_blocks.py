"""Loops over blocks of rows, beside what is made for all blocks at once, and over the rows that are left: as xLSTM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamfx.ir.facts import known
from streamfx.passes.analysis.derived_axes import keeps_row_positions
from streamfx.runtime.chunked_recurrences import Recurrence
from tests.support.exactness import Report, compare
from tests.support.spread import only
from tests.support.used import attending, batch

pytestmark = pytest.mark.compiled

BLOCK = 4


def loops_of(report: Report) -> int:
    (facts,) = report.facts
    return sum(isinstance(node.target, Recurrence) for node in facts.joint.nodes)


def memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A state goes from block to block, then from row to row; inside of a block rows meet at once."""
    count, width = q.shape[2] // BLOCK, q.shape[-1]
    whole = count * BLOCK
    a, b, c = (part[:, :, :whole].contiguous() for part in (q, k, v))
    state = q.new_zeros(*q.shape[:2], width, v.shape[-1])
    states = q.new_zeros(*q.shape[:2], (count + 1) * width, v.shape[-1])
    for i, start in enumerate(range(0, whole, BLOCK)):
        states[:, :, i * width : (i + 1) * width] = state
        state = state * 0.5 + b[:, :, start : start + BLOCK].mT @ c[:, :, start : start + BLOCK]
    states[:, :, -width:] = state
    before = states[:, :, :-width].view(*q.shape[:2], count, width, -1)
    a, b, c = (part.view(*part.shape[:2], count, BLOCK, -1) for part in (a, b, c))
    made, rest, state = ((a @ b.mT).tril() @ c + a @ before).flatten(2, 3), [], states[:, :, -width:]
    q, k, v = (part[:, :, whole:] for part in (q, k, v))
    for row in range(q.shape[2]):
        state = state * 0.9 + k[:, :, row, :, None] * v[:, :, row, None]
        rest.append((q[:, :, row, None] @ state)[:, :, 0])
    return torch.cat([made, torch.stack(rest, 2)], 2) if rest else made


@pytest.mark.parametrize("length", only([15, 23], [8, 12, 15, 23, 31]))
def test_other_numbers_of_blocks(length: int) -> None:
    """Three blocks and three rows are two loops, though both have three steps."""
    report = compare(attending(memory), batch(length), also=(1, 7, 64))
    blocks, rest = divmod(length, BLOCK)
    assert loops_of(report) == 2 * 2 * ((blocks > 2) + (rest > 2)), "one for each half of each layer"


@pytest.mark.parametrize(("length", "streams"), only([(11, True)], [(11, True), (13, False), (14, False)]))
def test_few_rows_behind_blocks(length: int, streams: bool) -> None:
    """One or two are no loop, and no rows of the sequence: what they are read by runs whole."""
    report = compare(attending(memory), batch(length), also=(1, 64), streams=streams)
    sequence = known(known(report.facts[0].found_axes).sequence)
    assert not streams or (sequence.length, sequence.chunk_alignment) == (length, BLOCK)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The backward half needs rows of the sequence again, and nothing that the forward half's steps have made."""
    a, b, c = (part.reshape(-1, part.shape[2] // BLOCK, BLOCK, part.shape[-1]) for part in (q, k, v))
    state, states = a.new_zeros(len(a), a.shape[-1], a.shape[-1]), []
    for i in range(a.shape[1]):
        states.append(state)
        state = 0.9 * state + b[:, i].mT @ c[:, i]
    return (a @ torch.stack(states, 1) + (a @ b.mT).tril() @ c).view(q.shape)


def test_rows_that_a_loop_goes_back_through() -> None:
    """Rows that a step of the backward half needs a step later are among the states of the loop that has read them."""
    assert loops_of(compare(attending(linear), batch(20), also=(1, 9, 64))) == 4


# -- blocks that read one table, and parts that are joined


class Tables(nn.Module):
    """Linear attention in blocks whose decays are in tables that all blocks read, as MiniMax's; a table may be trained."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        decays = torch.exp(-torch.arange(1.0, 5.0) / 3)[:, None]
        self.decays = nn.Parameter(decays) if trained else nn.Buffer(decays)
        self.pairs = nn.Buffer((decays / decays.T).tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for start in range(0, q.shape[2], BLOCK):
            a, b, c = (part[:, :, start : start + BLOCK] for part in (q, k, v))
            rows = a.shape[2]
            made.append((a @ b.mT * self.pairs[:rows, :rows]) @ c + (a * self.decays[:rows]) @ state)
            state = state * 0.3 + (b * self.decays[-rows:]).mT @ c
        return torch.cat(made, 2)


class TrainedTables(Tables):
    def __init__(self) -> None:
        super().__init__(trained=True)


@pytest.mark.parametrize("length", only([11], [10, 11, 19, 22]))
def test_blocks_that_read_one_table(length: int) -> None:
    """Two blocks are no loop, and three are none. Each has an axis of its own, though all are multiplied by the same numbers."""
    report = compare(attending(Tables), batch(length), also=(1, 7, 64))
    axes = known(report.facts[0].found_axes)
    joins = [node for node in axes.signatures if node.target is torch.ops.aten.cat.default and keeps_row_positions(node, axes)]
    assert len(joins) == 2 or length > 11, "one in each layer"


def test_blocks_that_train_one_table() -> None:
    """Its gradient is a sum over blocks, whose rows are then the same rows: exact, and no reader gets a view for itself."""
    report = compare(attending(TrainedTables), batch(22), also=(1, 64), streams=False)
    assert not [node for node in report.facts[0].joint.nodes if node.target is torch.ops.aten.alias.default]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in a graph of their own, as a break in the code leaves them."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, :, None] + turned * sin[:, :, None]


def side_by_side(x: Tensor) -> Tensor:
    """Rows of numbers, of which parts are worked on in turn, and which add up."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half].sin(), x[..., half:].cos()), -1).mul(x).cumsum(-1)


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.function(*inputs)
        return result


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_(i == 0) for i, shape in enumerate(shapes)]


def test_halves_that_change_places_are_features() -> None:
    """Nothing of a graph without a weight says which of its axes are rows, but that parts of features change places."""
    report = compare(Of(rotary), leaves((2, 19, 4, 6), (2, 19, 6), (2, 19, 6)), also=(1, 7, 64))
    assert known(known(report.facts[0].found_axes).sequence).length == 19


def test_rows_side_by_side() -> None:
    """Parts that stay where they stood are no features."""
    report = compare(Of(side_by_side), leaves((2, 22)), also=(1, 7, 64))
    assert known(known(report.facts[0].found_axes).sequence).length == 22
