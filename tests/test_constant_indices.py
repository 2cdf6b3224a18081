"""A look-up, or a put, at (row number, label) compares labels if the index is proven to name each row once, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx import explain
from streamfx.passes.rewrite.canonicalize import canonicalize
from tests.support.canonical import Case, graphs, same, special, targets
from tests.support.exactness import compare
from tests.test_constant_places import WIDTH, Attention, batch

aten = torch.ops.aten
AT = (aten.index.Tensor, aten.index_put.default)
KINDS = ("looked up", "put", "added", "added to zeros", "changed")
Rows = Callable[[], list[Tensor]]

PROVEN: dict[str, Rows] = {  # rows of x[2 * 4, 3], or of x.view(2, 4, 3), by one index or two
    "of a view": lambda: [torch.arange(8).view(2, 4)],
    "of a view twice": lambda: [torch.arange(8).view(4, 2).view(2, 4)],
    "of blocks and rows": lambda: [torch.arange(2)[:, None] * 4 + torch.arange(4)],
    "of repeated blocks": lambda: [torch.arange(2).repeat_interleave(4), torch.arange(4).repeat(2)],
    "by quotient and remainder": lambda: [torch.arange(8) // 4, torch.arange(8) % 4],
    "of a grid": lambda: list(torch.meshgrid(torch.arange(2), torch.arange(4), indexing="ij")),
    "in int32": lambda: [torch.arange(8, dtype=torch.int32).view(2, 4)],
    "turned twice": lambda: [torch.arange(8).view(2, 4).t().contiguous().t()],
}
OTHERS: dict[str, Rows] = {
    "turned": lambda: [torch.arange(8).view(4, 2).t()],
    "from behind": lambda: [torch.arange(8).view(2, 4).flip(1)],
    "counted from the end": lambda: [torch.arange(8).view(2, 4) - 8],
    "later by one": lambda: [(torch.arange(8).view(2, 4) + 1) % 8],
    "twice": lambda: [torch.arange(8).view(2, 4) // 2],
    "by time and block": lambda: [torch.arange(2)[:, None] + 2 * torch.arange(4)],
    "of blocks in another order": lambda: [(torch.arange(8) // 4 + 1) % 2, torch.arange(8) % 4],
    "with one row before its block": lambda: [torch.arange(8) // 4, (torch.arange(8) + 1) % 4],
    "that add up to those of rows": lambda: [(torch.arange(8) + 1) // 4 % 2, (torch.arange(8) + 1) % 4 - 1],
    "of a few rows": lambda: [torch.arange(4).view(2, 2)],
}


def case(rows_of: Rows, kind: str) -> Case:
    """Numbers at rows and labels are looked up, put, or added."""

    def function(x: Tensor, labels: Tensor) -> Tensor:
        rows = rows_of()
        shape = torch.broadcast_shapes(*(index.shape for index in rows))
        places = [*rows, labels[: shape.numel()].view(shape)]
        x = x if len(rows) == 1 else x.view(2, 4, 3)
        if kind == "looked up":
            return x[tuple(places)]
        if kind == "changed":
            return aten.index_put(x, places, x[tuple(places)] - 1)
        values = torch.arange(1, shape.numel() + 1).view(shape).to(x)
        return aten.index_put(torch.zeros_like(x) if kind == "added to zeros" else x, places, values, kind != "put")

    return Case(function, (special(8, 3), torch.tensor([0, 2, 1, -1, -3, 2, 0, 1])))


def is_compared(rows: Rows, kind: str) -> bool:
    """Whether nothing is looked up or put any more; what comes of it is the same."""
    made = case(rows, kind)
    before, after = graphs(made)
    for actual, truth in zip(after(*made.inputs), before(*made.inputs), strict=True):
        same(actual, truth, bits=True)
    return targets(after).isdisjoint(AT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROVEN)
def test_labels_of_each_row_are_compared(name: str, kind: str) -> None:
    assert is_compared(PROVEN[name], kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_labels_at_other_rows_are_looked_up(name: str, kind: str) -> None:
    assert not is_compared(OTHERS[name], kind)


@pytest.mark.parametrize("rows_of", [lambda: torch.arange(8).view(8, 1), lambda: torch.arange(8)[:, None] * 1])
def test_labels_of_all_rows_at_each_row_are_looked_up(rows_of: Callable[[], Tensor]) -> None:
    made = Case(lambda x, labels: x[rows_of(), labels], (special(8, 3), torch.arange(8) % 3))
    before, after = graphs(made)
    (actual,), (truth,) = after(*made.inputs), before(*made.inputs)
    same(actual, truth, bits=True)
    assert aten.index.Tensor in targets(after)


def test_labels_of_rows_are_compared_with_dynamic_sizes() -> None:
    def picked(x: Tensor, labels: Tensor) -> tuple[Tensor]:
        rows = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[0], x.shape[1])
        return (x.flatten(0, 1)[rows, labels] * 1,)

    traced = make_fx(picked, tracing_mode="symbolic")(special(2, 4, 3), torch.arange(8).view(2, 4) % 3)
    canonicalize(traced.graph)
    traced.recompile()
    x, labels = special(3, 5, 3), torch.arange(15).view(3, 5) % 3
    same(traced(x, labels)[0], picked(x, labels)[0], bits=True)
    assert aten.index.Tensor not in targets(traced)


def loss_at(rows_of: Callable[[int, int], Sequence[Any]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Cross entropy by labels at rows of flattened logits; of two indices, at rows of each sequence."""

    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = rows_of(2, len(x) // 2)
        scores = (x @ weight.t()).log_softmax(-1)
        if isinstance(rows[0], int):
            return -scores[list(rows), labels].mean()
        shape = torch.broadcast_shapes(*(index.shape for index in rows))
        return -(scores if len(rows) == 1 else scores.unflatten(0, (2, -1)))[(*rows, labels.view(shape))].mean()

    return loss


LOSSES = {
    "a view": lambda b, t: [torch.arange(b * t).view(b, t)],
    "blocks and rows": lambda b, t: [torch.arange(b)[:, None] * t + torch.arange(t)],
    "repeated blocks": lambda b, t: [torch.arange(b).repeat_interleave(t), torch.arange(t).repeat(b)],
    "a list": lambda b, t: list(range(b * t)),
}
RELATIVES = {
    "sequences that are not": lambda b, t: [torch.arange(b)[:, None] + b * torch.arange(t)],
    "rows twice": lambda b, t: [torch.arange(b * t) // 2],
    "rows later by one": lambda b, t: [(torch.arange(b * t) + 1) % (b * t)],
    "rows from behind": lambda b, t: [torch.arange(b * t).flip(0)],
    "a list that is not in order": lambda b, t: [1, 0, *range(2, b * t)],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_row_numbers_of_a_batch(name: str) -> None:
    compare(Attention(loss_at(LOSSES[name])).double(), batch(2), also=(5,))


@pytest.mark.parametrize("name", LOSSES)
def test_such_a_loss_needs_no_logits_of_all_rows(name: str) -> None:
    model, inputs = Attention(loss_at(LOSSES[name])), batch(2)
    model.head = nn.Linear(WIDTH, 4096, bias=False)
    logits = inputs["labels"].numel() * 4096 * 4
    assert explain(model, **inputs, chunk_size=4, loss_chunk_size=4).summary()["peak_bytes"] < logits


@pytest.mark.parametrize("name", RELATIVES)
def test_a_loss_at_other_rows_of_a_batch(name: str) -> None:
    compare(Attention(loss_at(RELATIVES[name])).double(), batch(2), streams=None)
