"""What is written or read at places that are constants streams: masks written row by row, losses by label, rows of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from streamfx.cost.meter import Meter
from streamfx.torch_private import FakeTensorMode
from tests.support.exactness import compare

aten = torch.ops.aten
WIDTH, VOCABULARY, ROWS = 12, 11, 24
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class OwnLoss(torch.autograd.Function):
    """Gradients are made beside the loss, in pieces of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, accumulates: bool) -> Tensor:
        loss, dx, dweight, size = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight), len(x) // 4
        for start in range(0, len(x), size):
            rows, own, at = x[start : start + size], labels[start : start + size], torch.arange(size)
            scores = rows @ weight.t()
            total = scores.logsumexp(-1)
            loss = loss + (total - scores[at, own]).sum()
            shares = (scores - total[:, None]).exp()
            if accumulates:
                shares.index_put_((at, own), shares.new_full((), -1.0), accumulate=True)
            else:
                shares[at, own] -= 1
            dx[start : start + size] = shares @ weight / len(x)
            dweight += shares.t() @ rows / len(x)
        ctx.save_for_backward(dx, dweight)
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dweight = ctx.saved_tensors
        return dx * gradient, dweight * gradient, None, None


def traced(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    scores = (x @ weight.t()).log_softmax(-1)
    return -scores[torch.arange(len(x)), labels].mean()


def of_rows(numbers: Sequence[int]) -> Loss:
    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return (x.unflatten(0, (2, -1))[:, list(numbers), :] @ weight.t()).logsumexp(-1).square().mean()

    return loss


def none(mask: Tensor) -> None:
    """Causal, as it is."""


def window(mask: Tensor) -> None:
    for row in range(len(mask)):
        mask[row, : max(0, row - 3)] = float("-inf")


def blocks(mask: Tensor) -> None:
    for start in range(0, len(mask), 6):
        mask[start : start + 6, : start + 6] = 0.0


class Attention(nn.Module):
    """One layer under a mask that is written piece by piece."""

    def __init__(self, loss: Loss = traced, write: Callable[[Tensor], None] = none) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.loss, self.write = loss, write

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        self.write(mask)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0])
        return self.loss(x.flatten(0, 1), self.head.weight, labels.flatten())


def batch(count: int = 2) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, (count, ROWS)) for name in ("ids", "labels")}


@pytest.mark.parametrize(("write", "attention"), [(window, {"window(4)"}), (blocks, None)])
def test_a_mask_that_is_written_piece_by_piece(write: Callable[[Tensor], None], attention: set[str] | None) -> None:
    compare(Attention(write=write).double(), batch(), attention=attention)


LOSSES: dict[str, Loss] = {
    "less one at each label": lambda *given: OwnLoss.apply(*given, False),  # type: ignore[no-untyped-call]
    "minus one added at each label": lambda *given: OwnLoss.apply(*given, True),  # type: ignore[no-untyped-call]
    "the last row by a list": of_rows([-1]),
    "rows by a list": of_rows([0, 1, -1]),
    "rows twice, in another order": of_rows([5, 5, 3]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_at_constant_places(name: str) -> None:
    compare(Attention(LOSSES[name]).double(), batch(1 if "label" in name else 2))


def test_a_peak_does_not_depend_on_what_was_explained_before() -> None:
    torch._dynamo.reset()
    model, inputs = Attention(write=window), batch()
    first, second = (explain(model, **inputs, chunk_size=8).summary()["peak_bytes"] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["slice_scatter", "select_scatter", "diagonal_scatter", "copy"])
def test_a_write_over_a_view_takes_the_memory_of_all(name: str) -> None:
    """Really, at first, and from the cache of fake tensors: of what is not as it stands in memory, less would be predicted."""

    def write() -> int:
        rows = torch.zeros(16, 64)[:, 5:9]
        with Meter() as meter:
            made = {
                "slice_scatter": lambda: aten.slice_scatter(rows, rows[:3], 0, 0, 3),
                "select_scatter": lambda: aten.select_scatter(rows, rows[0], 0, 3),
                "diagonal_scatter": lambda: aten.diagonal_scatter(rows, rows[0]),
                "copy": lambda: aten.copy(rows, rows[:1]),
            }[name]()
        assert made.shape == rows.shape
        return meter.peak

    truth = write()
    with FakeTensorMode():
        assert [write(), write()] == [truth, truth] == [16 * 64 * 4] * 2
