"""Where checkpoints around layers take less, the report says by how much, and which operator's results are alive at the peak."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.budget import in_bytes
from streamfx.cost.memory import bytes_like, cost_of
from streamfx.tools.inspect.at_peak import most_alive
from streamfx.tools.inspect.tracing import traced
from streamfx.tools.report.text import CHUNK_WORK

WIDTH, VOCABULARY = 16, 30


class Sorts(nn.Module):
    """A layer that streams nowhere: each row depends on the order of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)).erf().sort(1)[0]))  # type: ignore[no-any-return]


class Streams(Sorts):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, kind: type[Sorts], layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (1, 1024))


def test_the_operator_that_takes_more_than_checkpoints_is_named() -> None:
    found = streamfx.explain(Decoder(Sorts), ids())
    summary = found.summary()
    more = summary["peak_bytes"] - summary["checkpointing_peak_bytes"]
    assert more > 0
    (line,) = [line for line in str(found).splitlines() if "most at the peak" in line]
    assert f"more by {in_bytes(more)}" in line
    assert "results of aten.sort" in line and "test_at_peak.py" in line and ".erf().sort(1)[0]" in line


def test_nothing_is_named_where_checkpoints_take_more() -> None:
    assert "most at the peak" not in str(streamfx.explain(Decoder(Streams), ids(), chunk_size=64, loss_chunk_size=64))


def test_what_loops_compute_is_named_where_it_takes_most() -> None:
    assert f"most at the peak: {CHUNK_WORK}" in str(streamfx.explain(Decoder(Streams), ids(), chunk_size=1024))


@pytest.mark.parametrize("kind", [Sorts, Streams])
@pytest.mark.parametrize("layers", [1, 3])
def test_values_alive_take_the_bytes_of_the_peak(kind: type[Sorts], layers: int) -> None:
    """Of a graph in one piece, which is run on fake tensors."""
    (graph,) = traced(Decoder(kind, layers), (ids(),), {}, None).graphs
    found, values = most_alive(*graph.halves, graph.num_outputs)
    assert found == sum(bytes_like(node.meta["val"]) for node in values)
    assert found == pytest.approx(cost_of(*graph.halves, graph.num_outputs).peak, rel=0.02)
