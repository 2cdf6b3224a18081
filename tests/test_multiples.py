"""Gradients that are a number per sequence times what they are for ones are found along with the loss; all others are not."""

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
    """What a loss is made of: hidden states [b t d], a head [d v], labels [b t], which rows count [b t]."""

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
    """The mean of the squares of what rows [b t] sum up to."""
    return lambda head: rows(head).sum(1).square().mean()


def of_logits(logits: Callable[[Tensor], Tensor]) -> Loss:
    """The same of log probabilities by logits that something is done to."""
    return of_rows(lambda head: head.logps(logits(head.logits())))


def behind_attention(loss: Loss) -> Callable[..., Tensor]:
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


def is_found_with(loss: Loss, batch: int = 4, length: int = LENGTH, trained: bool = False) -> bool:
    """Whether no product with the vocabulary is left to the backward half; the gradients are eager's."""
    return in_one_pass(compare_function(behind_attention(loss), operands(batch, length, trained), (3, 1, 4), streams=None))


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


def every_other(head: Head) -> Tensor:
    sums = head.sums().unflatten(0, (-1, 2))
    return torch.tanh(sums[:, 0] - sums[:, 1]).sum()


def flattened_sums(head: Head) -> Tensor:
    """Rows are flat until they are summed."""
    logps = (head.x.flatten(0, 1) @ head.weight).log_softmax(-1).gather(-1, head.labels.flatten()[:, None])
    return logps.reshape(head.labels.shape).sum(1).square().mean()


def time_first(head: Head) -> Tensor:
    logps = (head.x.transpose(0, 1) @ head.weight).log_softmax(-1).gather(-1, head.labels.t()[..., None])
    return logps.squeeze(-1).sum(0).square().mean()


def entropies(head: Head) -> Tensor:
    p = head.logits().log_softmax(-1)
    return (p.exp() * p).sum((1, 2)).square().mean()


def selected_where_there_is_any(head: Head) -> Tensor:
    """A sequence of which nothing is selected has no length, and its gradient is zero in eager: what drives it is no number."""
    keep = head.labels > 100 * head.rows[:, None]
    means = torch.where(keep, head.logps(), 0).sum(1) / keep.sum(1)
    return torch.where(keep.any(1), means.square(), 0).sum()


def filled_where_there_is_any(head: Head) -> Tensor:
    drop = head.labels <= 100 * head.rows[:, None]
    means = head.logps().masked_fill(drop, 0).sum(1) / (~drop).sum(1)
    return means.square().masked_fill(drop.all(1), 0).sum()


MULTIPLES: dict[str, Loss] = {
    "preferences": preferences,
    "every other": every_other,
    "a root": lambda head: head.sums().square().sum().sqrt(),
    "of lengths": lambda head: torch.exp(head.sums() / (head.keep.sum(1) + 1)).mean(),
    "each of all sums": lambda head: head.sums().softmax(0).square().sum(),
    "flattened": of_rows(lambda head: head.logps((head.x.flatten(0, 1) @ head.weight).unflatten(0, head.labels.shape))),
    "flattened sums": flattened_sums,
    "time first": time_first,
    "normed": of_rows(lambda head: head.logps(F.layer_norm(head.x, (WIDTH,)) @ head.weight)),
    "capped": of_logits(lambda logits: 3 * torch.tanh(logits / 3)),
    "logsumexps": of_rows(lambda head: head.logits().logsumexp(-1)),
    "entropies": entropies,
    "classes that are hidden": of_rows(
        lambda head: head.logits().masked_fill(torch.arange(VOCABULARY) == 1, -1e9).logsumexp(-1),
    ),
    "selected": of_rows(lambda head: torch.where(head.labels > 1, head.logps(), 0)),
    "filled": of_rows(lambda head: head.logps().masked_fill(head.labels < 2, 0)),
    "selected logits": of_rows(lambda head: head.logps(torch.where(head.labels[..., None] > 1, head.logits(), 0))),
    "selected where there is any": selected_where_there_is_any,
    "filled where there is any": filled_where_there_is_any,
    "driven by zero": lambda head: torch.relu(head.sums() - 1e3).sum(),
    "some driven by zero": lambda head: torch.relu((sums := head.sums()) - sums.mean()).sum(),
}
SOME = ("preferences", "selected", "filled where there is any", "some driven by zero")


@pytest.mark.parametrize("name", only(SOME, MULTIPLES))
def test_one_pass(name: str) -> None:
    assert is_found_with(MULTIPLES[name])


@pytest.mark.parametrize("name", only(["time first"], ["preferences", "each of all sums", "flattened", "time first"]))
@pytest.mark.parametrize("batch", [LENGTH, WIDTH, 2])
def test_batches_as_long_as_the_sequence(name: str, batch: int) -> None:
    assert is_found_with(MULTIPLES[name], batch, length=batch)


def test_a_trained_head_runs_in_two_passes() -> None:
    assert not is_found_with(preferences, trained=True)


@pytest.mark.parametrize("trained", [False, True])
def test_one_number_scales_weights_as_well(trained: bool) -> None:
    assert is_found_with(lambda head: head.sums().sum().square(), trained=trained)
    assert is_found_with(lambda head: head.sums()[0].square(), batch=1, trained=trained)


# -- no multiples


class Bent(torch.autograd.Function):
    """The identity, whose gradient is bent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.tanh(gradients[0])


def halves(head: Head) -> Tensor:
    """The first half of the rows is summed into one, the others into another."""
    logps = head.logps()
    return logps[:, :3].sum(1).square().mean() + logps[:, 3:].sum(1).exp().mean()


def two_terms(head: Head) -> Tensor:
    logits = head.logits()
    return head.logps(logits).sum(1).square().mean() + F.cross_entropy(logits.flatten(0, 1), head.labels.flatten())


def pairs(head: Head) -> Tensor:
    """The batch is there twice."""
    return torch.einsum("btv,ctv->bct", head.logits(), head.logits()).tanh().sum(2).square().mean()


def selected_twice(head: Head) -> Tensor:
    return torch.where(head.labels < 5, torch.where(head.labels > 1, head.logps(), 0), 0).sum(1).square().mean()


OTHERS: dict[str, Loss] = {
    "bent gradients": of_logits(Bent.apply),
    "less the mean of all sequences": of_logits(lambda logits: logits - logits.mean(0, keepdim=True)),
    "mixed by a matrix": of_logits(lambda x: torch.einsum("bc,ctv->btv", torch.ones(len(x), len(x)).to(x).tril(), x)),
    "rolled": of_logits(lambda logits: logits.roll(1, 0)),
    "turned around": of_logits(lambda logits: logits + 0.5 * logits.flip(0)),
    "running sums": of_logits(lambda logits: logits.cumsum(0)),
    "normed over the batch": of_rows(lambda head: (head.logits().softmax(0) * head.keep[..., None]).sum(2)),
    "all pairs of sequences": pairs,
    "of each token": lambda head: (head.logps() * head.sums()[:, None]).sum().tanh(),
    "halves": halves,
    "two terms": two_terms,
    "selected by what is made": of_rows(lambda head: torch.where((logps := head.logps()) > -2, logps, 0)),
    "selected twice": selected_twice,
    "selected beside all": of_rows(lambda head: torch.where(head.labels > 1, p := head.logps(), 0) + 0.1 * p),
}


@pytest.mark.parametrize("name", only(["normed over the batch", "rolled", "two terms", "selected twice"], OTHERS))
@pytest.mark.parametrize("batch", [4, pytest.param(LENGTH, marks=pytest.mark.long)])
def test_no_multiple(name: str, batch: int) -> None:
    assert not is_found_with(OTHERS[name], batch)


@pytest.mark.parametrize("batch", [4, LENGTH])
def test_what_mixes_sequences_in_front_of_the_head_is_not_part_of_it(batch: int) -> None:
    is_found_with(of_rows(lambda head: head.logps((head.x + head.x.mean(0, keepdim=True)) @ head.weight)), batch)


def test_a_driver_that_is_infinite_shows() -> None:
    """What it reaches is no number in eager and here; rows of other sequences are untouched."""

    def infinite(head: Head) -> Tensor:
        sums = head.sums()
        return ((head.rows == 0) * 1e4 * -sums).exp().sum() + sums.square().sum()

    tensors, function = operands(3, LENGTH, False), behind_attention(infinite)
    tensors[-1].fill_(1)
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    recorded, _ = traced(function, tensors, chunk_size=3, loss_chunk_size=2)
    found = take_gradients(tensors)
    assert in_one_pass(recorded.facts[-1]) and not wanted["0"].isfinite().all()  # type: ignore[union-attr]
    for name in wanted:
        assert torch.equal(found[name].isfinite(), wanted[name].isfinite())  # type: ignore[union-attr]
    torch.testing.assert_close(found["0"][1:], wanted["0"][1:], rtol=1e-12, atol=1e-12)  # type: ignore[index]
