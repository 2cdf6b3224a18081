"""Reads and writes at constant places: by row index and label, and masks that are written slice by slice.

A read or write at (row index, label) compares labels if the indices are proven to be each row once, in order.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx import explain
from streamfx.passes.rewrite.canonicalize import canonicalize
from tests.support.canonical import Case, graphs, same, special, targets
from tests.support.decoders.parts import WIDTH
from tests.support.exactness import compare
from tests.support.tables import named_cases
from tests.support.used import attending, batch, used

pytestmark = pytest.mark.compiled

aten = torch.ops.aten
LOOKED_UP = {aten.index.Tensor, aten.index_put.default}
KINDS = ("looked up", "put", "added", "added to zeros", "changed")
Rows = Callable[[], list[Tensor]]

PROVEN: dict[str, Rows] = named_cases("proven", globals())
OTHERS: dict[str, Rows] = named_cases("others", globals())


def case(rows_of: Rows, kind: str) -> Case:
    """Elements at rows and labels are read, written, or added to."""

    def function(x: Tensor, labels: Tensor) -> Tensor:
        rows = rows_of()
        shape = torch.broadcast_shapes(*(index.shape for index in rows))
        places = [*rows, labels[: shape.numel()].view(shape) if shape != (8, 1) else labels]
        x = x if len(rows) == 1 else x.view(2, 4, 3)
        if kind == "looked up":
            return x[tuple(places)]
        if kind == "changed":
            return aten.index_put(x, places, x[tuple(places)] - 1)
        values = torch.arange(1, shape.numel() + 1).view(shape).to(x)
        return aten.index_put(torch.zeros_like(x) if kind == "added to zeros" else x, places, values, kind != "put")

    return Case(function, (special(8, 3), torch.tensor([0, 2, 1, -1, -3, 2, 0, 1])))


@pytest.mark.parametrize("name", PROVEN | OTHERS)
def test_labels_of_each_row_are_compared(name: str) -> None:
    """With equal results; at other rows, elements are read."""
    for kind in KINDS if not name.endswith("at each row") else KINDS[:1]:
        made = case((PROVEN | OTHERS)[name], kind)
        before, after = graphs(made)
        for actual, truth in zip(after(*made.inputs), before(*made.inputs), strict=True):
            same(actual, truth, bits=True)
        assert targets(after).isdisjoint(LOOKED_UP) is (name in PROVEN), kind


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


# -- losses


@pytest.mark.parametrize("is_list", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_loss_by_row_indices_of_a_batch(is_list: bool) -> None:
    """Of flattened logits by a list, or of each sequence by two indices."""

    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        (b, t), scores = labels.shape, model.head(x).log_softmax(-1)
        if is_list:
            return -scores.flatten(0, 1)[list(range(b * t)), labels.flatten()].mean()
        return -scores[torch.arange(b).repeat_interleave(t), torch.arange(t).repeat(b), labels.flatten()].mean()

    model, inputs = used(loss), batch(24)
    compare(model, inputs, also=(5,))
    model.head = nn.Linear(WIDTH, 4096, bias=False)
    peak = explain(model.float(), **inputs, chunk_size=4, loss_chunk_size=4).summary()["peak_bytes"]
    assert peak < inputs["labels"].numel() * 4096 * 4, "logits of all rows"


class OwnLoss(torch.autograd.Function):
    """Gradients are computed with the loss, for a quarter of the rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss, dx, dweight, size = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight), len(x) // 4
        for start in range(0, len(x), size):
            rows, own, at = x[start : start + size], labels[start : start + size], torch.arange(size)
            scores = rows @ weight.t()
            total = scores.logsumexp(-1)
            loss = loss + (total - scores[at, own]).sum()
            shares = (scores - total[:, None]).exp()
            shares[at, own] -= 1
            dx[start : start + size] = shares @ weight / len(x)
            dweight += shares.t() @ rows / len(x)
        ctx.save_for_backward(dx, dweight)
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dweight = ctx.saved_tensors
        return dx * gradient, dweight * gradient, None


def test_one_less_at_each_label() -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        made: Tensor = OwnLoss.apply(x.flatten(0, 1), model.head.weight, labels.flatten())  # type: ignore[no-untyped-call]
        return made

    compare(used(loss), batch(24, rows=1))


# -- masks


def written(write: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype).triu(1)
        write(mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return mix


def window(mask: Tensor) -> None:
    for row in range(len(mask)):
        mask[row, : max(0, row - 3)] = float("-inf")


def blocks(mask: Tensor) -> None:
    for start in range(0, len(mask), 6):
        mask[start : start + 6, : start + 6] = 0.0


@pytest.mark.parametrize(("write", "attention"), [(window, {"window(4)"}), (blocks, None)])
def test_a_mask_that_is_written_slice_by_slice(write: Callable[[Tensor], None], attention: set[str] | None) -> None:
    compare(attending(written(write), layers=1), batch(24), attention=attention)


def test_a_peak_does_not_depend_on_earlier_reports() -> None:
    model, inputs = attending(written(window), layers=1), batch(24)
    assert len({explain(model, **inputs, chunk_size=8).summary()["peak_bytes"] for _ in range(2)}) == 1
