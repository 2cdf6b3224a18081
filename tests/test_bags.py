"""Bags of embeddings stream if each bag is a row of as many indices; others run whole, and the reason says what would stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from streamfx.passes.rewrite.views.embedding_bag import END, FREQUENCY, LARGEST, LENGTHS
from tests.support.canonical import Case, graphs, plain, same, targets
from tests.support.exactness import compare

aten = torch.ops.aten
VOCABULARY, WIDTH, ROWS, EACH = 13, 8, 23, 3
Bag = Callable[..., Tensor]  # of the model, and of indices [b t k]: vectors [b * t, width]


class Bags(nn.Module):
    """One layer of attention on sums of bags, each a row of the sequence."""

    def __init__(self, bag: Bag) -> None:
        super().__init__()
        self.table, self.own = nn.Parameter(torch.randn(VOCABULARY, WIDTH)), nn.Parameter(torch.randn(EACH))
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.bag = bag

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.bag(self, ids).unflatten(0, ids.shape[:2])
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def in_rows(**how: Any) -> Bag:
    return lambda model, ids: F.embedding_bag(ids.flatten(0, 1), model.table, **how)


def by_offsets(offsets_of: Callable[[int], Tensor], **how: Any) -> Bag:
    return lambda model, ids: F.embedding_bag(ids.flatten(), model.table, offsets_of(len(ids) * ids.shape[1]), **how)


def weighted(model: Bags, ids: Tensor) -> Tensor:
    rows = ids.flatten(0, 1)
    return F.embedding_bag(rows, model.table, mode="sum", padding_idx=2, per_sample_weights=model.own.sin().expand(rows.shape))


def uneven(count: int) -> Tensor:
    """The first bag has an index less than the others, and the second one more."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, count) * EACH - (torch.arange(1, count) == 1).long()])


STREAM: dict[str, Bag] = {
    "sums": in_rows(mode="sum"),
    "means": in_rows(mode="mean"),
    "sums but for padding": in_rows(mode="sum", padding_idx=0),
    "means but for padding": in_rows(mode="mean", padding_idx=-1),
    "weighted": weighted,
    "by offsets": by_offsets(lambda count: torch.arange(count) * EACH, mode="sum"),
    "by offsets in steps": by_offsets(lambda count: torch.arange(0, count * EACH, EACH), mode="mean"),
    "by listed offsets": by_offsets(lambda count: torch.tensor([EACH * i for i in range(count)]), mode="sum"),
}
RUN_WHOLE: dict[str, tuple[Bag, str]] = {
    "the largest": (in_rows(mode="max"), LARGEST),
    "other lengths": (by_offsets(uneven, mode="sum"), LENGTHS),
    "a list of other lengths": (
        by_offsets(lambda count: torch.tensor([0, 1, *range(2 * EACH, EACH * count, EACH)]), mode="mean"),
        LENGTHS,
    ),
    "with the end": (
        by_offsets(lambda count: torch.arange(count + 1) * EACH, mode="sum", include_last_offset=True),
        END,
    ),
    "scaled by frequency": (in_rows(mode="sum", scale_grad_by_freq=True), FREQUENCY),
}


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, rows, EACH))
    ids[0, 1], ids[1, 2], ids[1, 3] = 0, VOCABULARY - 1, 2  # bags of nothing but padding
    return {"ids": ids, "labels": ids[..., 0]}


@pytest.mark.parametrize("name", STREAM)
def test_bags_of_one_length_stream(name: str) -> None:
    compare(Bags(STREAM[name]).double(), batch(), also=(5,))


@pytest.mark.parametrize("name", RUN_WHOLE)
def test_other_bags_run_whole(name: str) -> None:
    bag, why = RUN_WHOLE[name]
    report = compare(Bags(bag).double(), batch(), streams=False)
    reasons = [reason for facts in report.facts for reason in facts.reasons()]
    assert any(f"_embedding_bag.default {why}" in reason for reason in reasons)


@pytest.mark.parametrize("look_up", [in_rows(mode="sum", sparse=True), lambda model, ids: embedded(model, ids)])
def test_sparse_gradients_have_bytes(look_up: Bag) -> None:
    """They have no storage: their indices and values do. Gradients stay sparse, and are eager's."""
    model, inputs = Bags(look_up).double(), batch()
    assert "sparse=False" in str(explain(model, **inputs, chunk_size=4))
    model(**inputs).backward()
    eager, model.table.grad = model.table.grad, None
    torch.compile(model, backend="streambp", options={"chunk_size": 4})(**inputs).backward()
    assert eager is not None and eager.is_sparse and model.table.grad is not None and model.table.grad.is_sparse
    torch.testing.assert_close(model.table.grad.to_dense(), eager.to_dense(), rtol=1e-12, atol=1e-12)


def embedded(model: Bags, ids: Tensor) -> Tensor:
    return F.embedding(ids, model.table, sparse=True).sum(-2).flatten(0, 1)


def test_bags_of_dynamic_rows_stream() -> None:
    model, inputs = Bags(STREAM["means"]), batch()
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    assert "whole" not in str(explain(model, **inputs, chunk_size=8))


def backward(mode: int, padding: int = -1, step: int = 3) -> Case:
    """Both gradients of bags: of the table, and of weights."""

    def function(d: Tensor, table: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        offsets, own = torch.arange(0, 4 * step, step), weights if mode == 0 else None
        _, *found = aten._embedding_bag(table, indices, offsets, False, mode, False, own, False, padding)
        made = aten._embedding_bag_backward(d, indices, offsets, *found, 5, False, mode, False, own, padding)
        if mode:
            return (made,)
        return made, aten._embedding_bag_per_sample_weights_backward(d, table, indices, offsets, found[0], mode, padding)

    indices = torch.tensor([0, 1, 2, 2, 2, 2, 3, 4, 3, 1, 0, 2])
    return Case(function, (plain(4, 2), plain(5, 2), plain(12), indices), bits=False)


def forward(mode: int, step: int = 3) -> Case:
    def function(table: Tensor, indices: Tensor) -> Tensor:
        made: Tensor = aten._embedding_bag(table, indices, torch.arange(0, 4 * step, step), False, mode)[0]
        return made

    return Case(function, (plain(5, 2), torch.arange(12) % 5), bits=False)


@pytest.mark.parametrize("case", [forward(0, 2), forward(1, 2), backward(0, step=2), backward(1, step=2)])
def test_a_longer_last_bag_stays(case: Case) -> None:
    before, after = graphs(case)
    assert aten._embedding_bag.default in targets(after)
    for actual, truth in zip(after(*case.inputs), before(*case.inputs), strict=True):
        same(actual, truth, bits=False)


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("mode", [0, 1])
def test_gradients_of_bags(mode: int, padding: int) -> None:
    case = backward(mode, padding)
    before, after = graphs(case)
    assert not any("_embedding_bag_" in str(node.target) for node in after.graph.nodes)
    for actual, truth in zip(after(*case.inputs), before(*case.inputs), strict=True):
        same(actual, truth, bits=False)
