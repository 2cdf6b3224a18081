"""A call of which Dynamo gives up a part: what is left is not compared with all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import streamfx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def test_part_of_a_step_is_not_compared_with_all_of_it() -> None:
    """Behind a break in a loop the rest of a function is not traced: its memory is not in the figures."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(8, 400)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return self.head(x).logsumexp(-1).mean()

    found = streamfx.explain(Broken(), torch.randn(2, 64, 8), chunk_size=16)
    assert any(item["given_up"] for item in found.summary()["break_reasons"])
    assert str(found).startswith("streamfx: not compared with other ways: part of the step is not traced")
    assert found.page.gains is None and found.page.verdict.startswith("Not compared")
