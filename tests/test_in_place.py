"""Large gradients that are scaled and added in place: one buffer, and the same numbers however often the backward runs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.cost.meter import Meter

pytestmark = pytest.mark.compiled

VOCABULARY, WIDTH = 20_000, 8
TABLE = VOCABULARY * WIDTH * 8  # bytes of the embedding
IDS = torch.randint(0, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(1))
OPTIONS: dict[str, Any] = {"chunk_size": 16, "loss_chunk_size": 2}


class Tied(nn.Module):
    """An embedding that is the head as well: all that is large is as large as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = x[:, None]
        x = x + self.out(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


def gradients(call: Any, model: nn.Module, runs: int) -> list[tuple[Tensor, ...]]:
    loss = 3 * call(IDS)
    return [torch.autograd.grad(loss, list(model.parameters()), retain_graph=number + 1 < runs) for number in range(runs)]


@pytest.mark.parametrize("runs", [1, 3])
def test_runs_that_keep_the_graph_see_what_was_saved_and_overwrite_no_gradient(runs: int) -> None:
    own = Tied()
    eager = deepcopy(own)
    found = gradients(torch.compile(own, backend="streambp", options=OPTIONS), own, runs)
    for one in found:
        torch.testing.assert_close(one, gradients(eager, eager, 1)[0], rtol=1e-12, atol=1e-14)


def test_two_gradients_of_the_table_are_alive_at_most() -> None:
    """The head's part and the look-up's; as predicted, and as it is."""
    model = Tied()
    predicted = streamfx.explain(model, IDS, options=OPTIONS).summary()["peak_bytes"]
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    call(IDS).backward()
    model.zero_grad()
    with Meter() as meter:
        call(IDS).backward()
    assert 2 * TABLE <= meter.peak < 2.9 * TABLE
    assert meter.peak == pytest.approx(predicted, rel=0.05)
