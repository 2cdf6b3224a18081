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

VOCABULARY, WIDTH, LENGTH = 20_000, 8, 64
TABLE = VOCABULARY * WIDTH * 8  # bytes of the embedding
OPTIONS: dict[str, Any] = {"chunk_size": 16, "loss_chunk_size": 2}


class Tied(nn.Module):
    """An embedding that is the head as well: all that is large is as large as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = x[:, None]
        x = x + self.out(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def both() -> tuple[Tied, Tied]:
    own = Tied()
    return own, deepcopy(own)


@pytest.mark.parametrize("retained", [0, 1, 2])
def test_runs_that_keep_the_graph_see_what_was_saved(retained: int) -> None:
    own, eager = both()
    for call in (torch.compile(own, backend="streambp", options=OPTIONS), eager):
        loss = 3 * call(ids())
        for _ in range(retained):
            loss.backward(retain_graph=True)
        loss.backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad, rtol=1e-12, atol=1e-14)


def test_gradients_handed_out_are_not_overwritten() -> None:
    own, eager = both()
    loss = 3 * torch.compile(own, backend="streambp", options=OPTIONS)(ids())
    weights = list(own.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    held = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, weights)
    expected = torch.autograd.grad(3 * eager(ids()), list(eager.parameters()))
    for one, copy, other, right in zip(first, held, second, expected, strict=True):
        assert torch.equal(one, copy)
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(other, right, rtol=1e-12, atol=1e-14)


def test_two_gradients_of_the_table_are_alive_at_most() -> None:
    """The head's part and the look-up's; as predicted, and as it is."""
    model = Tied()
    predicted = streamfx.explain(model, ids(), options=OPTIONS).summary()["peak_bytes"]
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    call(ids()).backward()
    model.zero_grad()
    with Meter() as meter:
        call(ids()).backward()
    assert 2 * TABLE <= meter.peak < 2.9 * TABLE
    assert meter.peak == pytest.approx(predicted, rel=0.05)
