"""Parts of the sequence, worked on in turn and joined again: a chunk joins its own rows of each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamfx.ir.facts import known
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
