"""Reasons of fallbacks, in the words of a user, with a replacement to write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import streamfx
from streamfx.tools.inspect.tracing import traced
from streamfx.tools.report.fallback_reasons import (
    BY_INDEX,
    JOINED,
    ON_HOST,
    OTHER,
    OTHER_DIMENSION,
    PARTS,
    RANKS,
    advice_on_break,
    obstacles,
)
from tests.support.collectives import data_of
from tests.support.decoders import VOCABULARY, Decoder, Heads
from tests.support.over_ranks import one_of_many
from tests.support.sharded import Decoder as ByRanks
from tests.support.spread import spread
from tests.test_sequence_parallel import Ulysses

pytestmark = pytest.mark.compiled


class Mixed(Decoder):
    """Attention, and then a function of all rows of x [b t d]."""

    attention = Heads

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        x = super().hidden(x, **more)
        return x + self.mix(x)


def order(x: Tensor) -> Tensor:
    return x.detach().sum((0, 2)).argsort()


def of_all(summary: Tensor, x: Tensor) -> Tensor:
    """Give each row the mean of a few."""
    return summary.mean(1, keepdim=True).expand_as(x)


def attended(x: Tensor) -> Tensor:
    queries = torch.ones(x.shape[0], 1, 3, x.shape[2], dtype=x.dtype).cumsum(2)
    return of_all(F.scaled_dot_product_attention(queries, x[:, None], x[:, None]).mean(1), x)


def parts(x: Tensor) -> Tensor:
    one, two, three = x.split([7, 5, 7], 1)
    return torch.cat([three.sin(), two, one], 1)


def joined(x: Tensor) -> Tensor:
    """Unfused attention over rows and the sums of blocks of rows."""
    keys = torch.cat([x, x[:, :18].unflatten(1, (6, 3)).sum(2)], 1)
    return (x @ keys.mT).softmax(-1) @ keys


WHYS: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (parts, "concatenates parts with separate rows to one sequence", PARTS),
    (joined, "concatenates rows of the sequence and blocks of its rows", JOINED),
    (lambda x: of_all(x[:, ::12].sin(), x), "aten.slice.Tensor reads every 12th row of the sequence", OTHER_DIMENSION),
    (lambda x: of_all(x[:, torch.arange(3) * 5].sin(), x), "reads rows by index, from anywhere in the sequence", BY_INDEX),
    (
        lambda x: torch.ones_like(x).index_put((torch.arange(len(x))[:, None], order(x)), x.sin()),
        "writes rows by index, anywhere in the sequence",
        BY_INDEX,
    ),
    (lambda x: x.flip(1).sin(), "changes the order of the rows of the sequence", OTHER_DIMENSION),
    (lambda x: x.sort(1).values, "mixes the rows of the sequence", OTHER_DIMENSION),
    (attended, "has queries that are not rows of the sequence", OTHER_DIMENSION),
    (lambda x: x.reshape(len(x), x.shape[2], -1).mT.sin(), "regroups rows of one length into rows of another", OTHER),
]


@pytest.mark.parametrize(("mix", "found", "do"), spread(WHYS, 3), ids=[found for _, found, _ in WHYS])
def test_a_fallback_has_a_reason_and_advice(mix: Callable[[Tensor], Tensor], found: str, do: str) -> None:
    ids = torch.randint(0, VOCABULARY, (2, 19))
    (graph,) = traced(Mixed(mix), (ids, ids), {}, {}).graphs
    reasons = [(item.found, item.do) for item in obstacles(graph.facts).values()]
    assert any(found in text and advice == do for text, advice in reasons), reasons


def test_a_graph_break_has_advice() -> None:
    """The host reads counts of rows."""

    def function(x: Tensor) -> Tensor:
        counts = (x[..., 0] > 0).sum(0).tolist()
        return sum(part.square().sum() for part in x.split([counts[0], len(x) - counts[0]]))  # type: ignore[return-value]

    report = streamfx.explain(function, torch.randn(6, 2, requires_grad=True))
    breaks = report.summary()["break_reasons"]
    assert any(ON_HOST in item["do"] for item in breaks), breaks
    assert advice_on_break("anything else", "a hint") == "a hint"


class InOwnOrder(Ulysses):
    """Sorts received rows by data of this rank alone."""

    def forward(self, x: Tensor) -> Tensor:
        arrived = self.by_rows(self.by_heads(x.unflatten(-1, (-1, 4))))
        return x.scatter_add(1, x.detach().sum(-1, keepdim=True).argsort(1).expand_as(arrived), arrived)


def test_rows_exchanged_by_ranks_have_their_own_reason() -> None:
    """Attention between two exchanges runs once for each group of heads: there is nothing to change."""
    model = ByRanks(layers=2, width=32)
    for layer, kind in zip(model.layers, (Ulysses, InOwnOrder), strict=True):
        layer.__class__ = kind
    with one_of_many(2):
        found = streamfx.explain(model, *data_of(0, 64), options={"chunk_size": 16, "loss_chunk_size": 16})
        stages, text = found.stages, str(found)
    assert stages[0].attention == ("all ranks' rows",)
    reasons = {item.operator: (item.found, item.do) for stage in stages for item in stage.obstacles}
    for name in ("attention", "attention_backward"):
        why, do = reasons[f"streamfx.{name}.default"]
        assert "rows that ranks exchange" in why and do == RANKS
    assert reasons["aten.scatter_add.default"][1] == BY_INDEX
    assert "these operators fall back and run between loops, the rest streams:" in text
