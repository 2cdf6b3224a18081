"""Rows in front of the head that data choose: the layers stream, and what follows the unknown number of rows runs whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from tests.support import decoders
from tests.support.exactness import compare
from tests.support.spread import only
from tests.test_losses import batch


def rows_taken_twice(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    taken = labels % 3 > 0
    return F.cross_entropy(head(x[taken]), labels[taken])


def rows_taken_by_two_masks(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(x[labels % 3 > 0]), labels[labels % 3 > 0])


def rows_taken_by_number(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    taken = (labels.flatten() % 3 > 0).nonzero()[:, 0]
    return F.cross_entropy(head(x.flatten(0, 1)[taken]), labels.flatten()[taken])


class TakesRows(decoders.Plain):
    """Rows are taken out in front of the head."""

    taking = staticmethod(rows_taken_twice)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.taking(self.head, self.hidden(self.embed(ids)), labels)


@pytest.mark.parametrize("taking", only([rows_taken_twice], [rows_taken_twice, rows_taken_by_two_masks, rows_taken_by_number]))
@pytest.mark.parametrize("budget", [None, "120K"])
def test_layers_stream_before_rows_of_an_unknown_number(taking: Callable[..., Tensor], budget: str | None) -> None:
    model = decoders.made(type("TakesRows", (TakesRows,), {"taking": staticmethod(taking)}))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        sizes = {"chunk_size": 5} if budget is None else {"chunk_size": "auto", "memory_budget": budget, "bodies": "eager"}
        report = compare(model, batch(), streams=None, attention={"causal"}, **sizes)  # type: ignore[arg-type]
        assert any(facts.program is not None for facts in report.facts)
        found = str(explain(model, **batch(), chunk_size=5))
    assert "1 graph, no graph breaks" in found and ("ignore_index" in found or taking is rows_taken_by_number)


def test_rows_that_are_taken_break_the_graph_and_explain_says_what_avoids_it() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        assert "xk, yk = x[k], y[k]" in str(explain(decoders.made(TakesRows), **batch(), chunk_size=5))


# -- numbers that are read from data


class Reads(decoders.Plain):
    """A number of the data (`.item()`) is a factor, a bound or a result; it is known only when the graph runs."""

    way = "factor"

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.way == "bound":
            n = ids[0, 0].item() % 5 + 2
            torch._check(n >= 2)
            torch._check(n <= 7)
            x = x.masked_fill((torch.arange(ids.shape[1]) < n)[:, None], 0.5)
        elif self.way == "sum":
            x = x * (1 + x.sum().item())
        x = self.hidden(x)
        if self.way == "factor":
            x = x * ids.max().item()
        elif self.way == "largest":
            x = x / (1 + x.detach().abs().amax().item())
        logits = self.head(x)
        if self.way == "slice":
            k = int(ids[0, 0].item() % 3)
            return logits[:, k : k + 4].square().mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("way", ["factor", "bound", "sum", "largest", "slice"])
def test_numbers_that_are_read_from_data_keep_nothing_from_streaming(way: str) -> None:
    model = decoders.made(type("Reads", (Reads,), {"way": way}))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = compare(model, batch(), streams=None, attention={"causal"}, chunk_size=5)
        assert report.facts and all(facts.program is not None and not facts.faults for facts in report.facts)
        found = explain(model, **batch(), chunk_size=5)
    assert found.summary()["graphs"] == 1 and found.summary()["peak_bytes"] > 0
