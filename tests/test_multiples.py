"""Gradients that are homogeneous in a number per sequence are computed with the loss; all others in a second pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.spread import only
from tests.support.tracing import compare_function, take_gradients, traced

WIDTH, VOCABULARY, LENGTH = 4, 7, 6
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Head:
    """Inputs of a loss: hidden states [b t d], a head [d v], labels [b t], which rows count [b t]."""

    def __init__(self, x: Tensor, weight: Tensor, labels: Tensor, keep: Tensor) -> None:
        self.x, self.weight, self.labels, self.keep = x, weight, labels, keep
        self.rows = torch.arange(len(labels))

    def logits(self) -> Tensor:
        return self.x @ self.weight

    def logps(self, logits: Tensor | None = None) -> Tensor:
        logits = self.logits() if logits is None else logits
        return logits.log_softmax(-1).gather(-1, self.labels[..., None]).squeeze(-1)

    def sums(self) -> Tensor:
        return (self.logps() * self.keep).sum(1)


Loss = Callable[[Head], Tensor]


def of_rows(rows: Callable[[Head], Tensor]) -> Loss:
    """The mean of the squares of the sums of rows [b t]."""
    return lambda head: rows(head).sum(1).square().mean()


def of_logits(logits: Callable[[Tensor], Tensor]) -> Loss:
    """The same for log probabilities of changed logits."""
    return of_rows(lambda head: head.logps(logits(head.logits())))


def after_attention(loss: Loss) -> Callable[..., Tensor]:
    def function(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        q = (x @ w)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0] @ w
        return loss(Head(x, *others))

    return function


def operands(batch: int, length: int, trained: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (batch, length, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCABULARY)
    tensors = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, (batch, length), generator=draw)
    keep = (torch.rand(batch, length, generator=draw) < 0.7).double()
    return [*(item.requires_grad_(i < 2 or trained) for i, item in enumerate(tensors)), labels, keep]


def is_one_pass(loss: Loss, batch: int = 4, length: int = LENGTH, trained: bool = False) -> bool:
    """Whether the backward has no matmul with the vocabulary; the gradients are eager's."""
    return in_one_pass(compare_function(after_attention(loss), operands(batch, length, trained), (3, 1, 4), streams=None))


def in_one_pass(facts: Facts) -> bool:
    last = facts.stages[-1]
    products = [node for node in facts.joint.nodes if node.target in PRODUCTS and VOCABULARY in _sizes(node)]
    own = {*last.forward, *last.backward}
    return bool(last.gradient_in_forward) and bool(products) and all(node in own for node in products)


def _sizes(node: Any) -> set[int]:
    return {size for item in (node, *node.all_input_nodes) for size in item.meta["val"].shape}


def preferences(head: Head) -> Tensor:
    chosen, rejected = head.sums().chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def filled_where_there_is_any(head: Head) -> Tensor:
    """A sequence without selected tokens has zero tokens; its gradient is zero in eager, and its cotangent scale is NaN."""
    drop = head.labels <= 100 * head.rows[:, None]
    means = head.logps().masked_fill(drop, 0).sum(1) / (~drop).sum(1)
    return means.square().masked_fill(drop.all(1), 0).sum()


HOMOGENEOUS: dict[str, Loss] = {
    "preferences": preferences,
    "a root": lambda head: head.sums().square().sum().sqrt(),
    "of lengths": lambda head: torch.exp(head.sums() / (head.keep.sum(1) + 1)).mean(),
    "softmax of sums": lambda head: head.sums().softmax(0).square().sum(),
    "flattened": of_rows(lambda head: head.logps((head.x.flatten(0, 1) @ head.weight).unflatten(0, head.labels.shape))),
    "time first": of_rows(lambda head: head.logps((head.x.transpose(0, 1) @ head.weight).transpose(0, 1))),
    "normed": of_rows(lambda head: head.logps(F.layer_norm(head.x, (WIDTH,)) @ head.weight)),
    "capped": of_logits(lambda logits: 3 * torch.tanh(logits / 3)),
    "logsumexp": of_rows(lambda head: head.logits().masked_fill(torch.arange(VOCABULARY) == 1, -1e9).logsumexp(-1)),
    "entropies": of_rows(lambda head: ((p := head.logits().log_softmax(-1)).exp() * p).sum(2)),
    "selected": of_rows(lambda head: torch.where(head.labels > 1, head.logps(), 0)),
    "filled": of_rows(lambda head: head.logps().masked_fill(head.labels < 2, 0)),
    "selected logits": of_rows(lambda head: head.logps(torch.where(head.labels[..., None] > 1, head.logits(), 0))),
    "filled if there is any": filled_where_there_is_any,
    "some with zero gradients": lambda head: torch.relu((sums := head.sums()) - sums.mean()).sum(),
}
SOME = ("preferences", "selected", "filled if there is any", "some with zero gradients")


@pytest.mark.parametrize("name", only(SOME, HOMOGENEOUS))
def test_one_pass(name: str) -> None:
    assert is_one_pass(HOMOGENEOUS[name])


@pytest.mark.parametrize("name", only(["time first"], ["preferences", "time first"]))
@pytest.mark.parametrize("batch", [LENGTH, WIDTH, 2])
def test_batches_as_long_as_the_sequence(name: str, batch: int) -> None:
    assert is_one_pass(HOMOGENEOUS[name], batch, length=batch)


def test_a_trained_head_runs_in_two_passes() -> None:
    assert not is_one_pass(preferences, trained=True)


@pytest.mark.parametrize("trained", [False, True])
def test_one_number_scales_weights_as_well(trained: bool) -> None:
    assert is_one_pass(lambda head: head.sums().sum().square(), trained=trained)
    assert is_one_pass(lambda head: head.sums()[0].square(), batch=1, trained=trained)


# -- gradients that are not homogeneous


class Bent(torch.autograd.Function):
    """The identity, with a nonlinear gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.tanh(gradients[0])


def halves(head: Head) -> Tensor:
    """Each half of the rows has a sum."""
    logps = head.logps()
    return logps[:, :3].sum(1).square().mean() + logps[:, 3:].sum(1).exp().mean()


def two_terms(head: Head) -> Tensor:
    logits = head.logits()
    return head.logps(logits).sum(1).square().mean() + F.cross_entropy(logits.flatten(0, 1), head.labels.flatten())


def selected_twice(head: Head) -> Tensor:
    return torch.where(head.labels < 5, torch.where(head.labels > 1, head.logps(), 0), 0).sum(1).square().mean()


OTHERS: dict[str, Loss] = {
    "nonlinear gradients": of_logits(Bent.apply),
    "less the mean of all sequences": of_logits(lambda logits: logits - logits.mean(0, keepdim=True)),
    "mixed by a matrix": of_logits(lambda x: torch.einsum("bc,ctv->btv", torch.ones(len(x), len(x)).to(x).tril(), x)),
    "rolled": of_logits(lambda logits: logits.roll(1, 0)),
    "running sums": of_logits(lambda logits: logits.cumsum(0)),
    "normed over the batch": of_rows(lambda head: (head.logits().softmax(0) * head.keep[..., None]).sum(2)),
    "of each token": lambda head: (head.logps() * head.sums()[:, None]).sum().tanh(),
    "halves": halves,
    "two terms": two_terms,
    "selected by probability": of_rows(lambda head: torch.where((logps := head.logps()) > -2, logps, 0)),
    "selected twice": selected_twice,
    "selected, and all": of_rows(lambda head: torch.where(head.labels > 1, p := head.logps(), 0) + 0.1 * p),
}


@pytest.mark.parametrize("name", only(["normed over the batch", "rolled", "two terms", "selected twice"], OTHERS))
@pytest.mark.parametrize("batch", [4, pytest.param(LENGTH, marks=pytest.mark.long)])
def test_two_passes(name: str, batch: int) -> None:
    assert not is_one_pass(OTHERS[name], batch)


@pytest.mark.parametrize("batch", [4, LENGTH])
def test_sequences_that_are_mixed_before_the_head_are_exact(batch: int) -> None:
    is_one_pass(of_rows(lambda head: head.logps((head.x + head.x.mean(0, keepdim=True)) @ head.weight)), batch)


def test_an_infinite_cotangent_scale() -> None:
    """Gradients that it reaches are NaN in eager and here; other sequences have finite ones."""

    def infinite(head: Head) -> Tensor:
        sums = head.sums()
        return ((head.rows == 0) * 1e4 * -sums).exp().sum() + sums.square().sum()

    tensors, function = operands(3, LENGTH, False), after_attention(infinite)
    tensors[-1].fill_(1)
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    recorded, _ = traced(function, tensors, chunk_size=3, loss_chunk_size=2)
    found = take_gradients(tensors)
    assert in_one_pass(recorded.facts[-1]) and not wanted["0"].isfinite().all()  # type: ignore[union-attr]
    for name in wanted:
        assert torch.equal(found[name].isfinite(), wanted[name].isfinite())  # type: ignore[union-attr]
    torch.testing.assert_close(found["0"][1:], wanted["0"][1:], rtol=1e-12, atol=1e-12)  # type: ignore[index]
