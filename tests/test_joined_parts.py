"""Parts of the sequence, worked on in turn and joined again: a chunk joins its own rows of each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamfx.ir.facts import known
from streamfx.passes.analysis.derived_axes import stands_in_place
from tests.support.decoders import VOCABULARY, Decoder, Heads
from tests.support.decoders.fused import CausalHeads
from tests.support.exactness import compare
from tests.support.spread import only


def batch(length: int) -> dict[str, Tensor]:
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return {"ids": ids, "labels": labels}


class BlockHeads(Heads):
    """Linear attention written as a loop over blocks of rows, as MiniMax's."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for start in range(0, q.shape[2], 4):
            a, b, c = (part[:, :, start : start + 4] for part in (q, k, v))
            made.append((a @ b.mT).tril() @ c + a @ state)
            state = state * 0.9 + b.mT @ c
        return torch.cat(made, 2)


class Blocks(Decoder):
    attention = BlockHeads


@pytest.mark.parametrize("length", only([22], [12, 19, 22]))
def test_blocks_in_turn(length: int) -> None:
    """The last block may be shorter, and chunks need not hold whole blocks."""
    report = compare(Blocks().double(), batch(length), also=(1, 64))
    assert known(known(report.facts[0].found_axes).sequence).length == length


def test_a_last_block_of_one_row() -> None:
    """A single row has no rows to loop over: what joins it to others runs whole."""
    compare(Blocks().double(), batch(21), also=(1, 64), streams=False)


class TableHeads(Heads):
    """Linear attention in blocks whose decays are in tables that all blocks read, as MiniMax's; a table may be trained."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        decays = torch.exp(-torch.arange(1.0, 5.0) / 3)[:, None]
        self.decays = torch.nn.Parameter(decays) if trained else torch.nn.Buffer(decays)
        self.pairs = torch.nn.Buffer((decays / decays.T).tril())

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for start in range(0, q.shape[2], 4):
            a, b, c = (part[:, :, start : start + 4] for part in (q, k, v))
            rows = a.shape[2]
            made.append((a @ b.mT * self.pairs[:rows, :rows]) @ c + (a * self.decays[:rows]) @ state)
            state = state * 0.3 + (b * self.decays[-rows:]).mT @ c
        return torch.cat(made, 2)


class Tables(Decoder):
    attention = TableHeads


class TrainedTableHeads(TableHeads):
    def __init__(self) -> None:
        super().__init__(trained=True)


class TrainedTables(Decoder):
    attention = TrainedTableHeads


@pytest.mark.parametrize("length", only([22], [12, 19, 22]))
def test_a_loop_over_blocks_that_read_one_table(length: int) -> None:
    compare(Tables().double(), batch(length), also=(1, 7, 64))


@pytest.mark.parametrize("length", only([11], [10, 11]))
def test_blocks_that_read_one_table(length: int) -> None:
    """Two blocks are no loop. Each has an axis of its own, though all are multiplied by the same numbers."""
    report = compare(Tables().double(), batch(length), also=(1, 7, 64))
    axes = known(report.facts[0].found_axes)
    joins = [node for node in axes.signatures if node.target is torch.ops.aten.cat.default and stands_in_place(node, axes)]
    assert len(joins) == 2, "one in each layer"


def test_blocks_that_train_one_table() -> None:
    """Its gradient is a sum over blocks, whose rows are then the same rows: exact, and no reader gets a view for itself."""
    report = compare(TrainedTables().double(), batch(22), also=(1, 64), streams=False)
    assert not [node for node in report.facts[0].joint.nodes if node.target is torch.ops.aten.alias.default]


class Joined(Decoder):
    """Attention, whose rows are then taken apart and joined in some way."""

    attention = CausalHeads

    def __init__(self, parts: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.parts = parts

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        x = super().hidden(x, **more)
        z = torch.cat(self.parts(x), 1)
        return x + z[:, : x.shape[1]].cumsum(1).sin()


IN_PLACE: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "thirds": lambda x: [x[:, :6].sin(), x[:, 6:12].cos(), x[:, 12:] * 2],
    "of two values": lambda x: [x[:, :9].sin(), x.cos()[:, 9:]],
    "of many": lambda x: [x[:, i : i + 2].sin() for i in range(0, 18, 2)],
}
ELSEWHERE: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "swapped": lambda x: [x[:, 9:].sin(), x[:, :9]],
    "backwards": lambda x: [x[:, 12:].sin(), x[:, 6:12], x[:, :6]],
    "one row left out": lambda x: [x[:, :8].sin(), x[:, 9:], x[:, :3]],
    "one row twice": lambda x: [x[:, :9].sin(), x[:, 8:14], x[:, 14:]],
    "the first part again": lambda x: [x[:, :6].sin(), x[:, :6].cos(), x[:, :6]],
    "of blocks": lambda x: list(x.unflatten(1, (3, 6)).sin().unbind(1)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_parts_in_place(name: str) -> None:
    compare(Joined(IN_PLACE[name]).double(), batch(18), also=(1, 64), attention={"causal"})


@pytest.mark.parametrize("name", ELSEWHERE)
def test_parts_elsewhere(name: str) -> None:
    """Rows that do not stand behind one another: exact, however they run."""
    compare(Joined(ELSEWHERE[name]).double(), batch(18), also=(1, 64), streams=None)


class Rotary(torch.nn.Module):
    """Rotary positions in a graph of their own, as a break in the code leaves them."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos[:, :, None] + turned * sin[:, :, None]


def test_halves_that_change_places_are_features() -> None:
    """Nothing of a graph without a weight says which of its axes are rows, but that parts of features change places."""
    x, cos, sin = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 19, 4, 6), (2, 19, 6), (2, 19, 6)))
    report = compare(Rotary(), {"x": x.requires_grad_(), "cos": cos, "sin": sin}, also=(1, 7, 64))
    assert known(known(report.facts[0].found_axes).sequence).length == 19


class SideBySide(torch.nn.Module):
    """Rows of numbers that lie side by side, of which parts are worked on in turn, and which add up."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((x[..., :half].sin(), x[..., half:].cos()), -1).mul(x).cumsum(-1)


def test_rows_side_by_side() -> None:
    """Parts that stay where they stood are no features."""
    report = compare(SideBySide(), {"x": torch.randn(2, 22, dtype=torch.float64).requires_grad_()}, also=(1, 7, 64))
    assert known(known(report.facts[0].found_axes).sequence).length == 22
