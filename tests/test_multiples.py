"""Gradients that are a number per sequence times what they are for ones are found along with the loss; all others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.spread import only, spread
from tests.support.tracing import compare_function, take_gradients, traced

WIDTH, VOCABULARY, LENGTH = 4, 7, 6
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
Loss = Callable[["Head"], Tensor]


class Head:
    """What a loss is made of: hidden states [b t d], a head [d v], labels [b t], which rows count [b t]."""

    def __init__(self, x: Tensor, weight: Tensor, labels: Tensor, keep: Tensor) -> None:
        self.x, self.weight, self.labels, self.keep = x, weight, labels, keep

    def logits(self) -> Tensor:
        return self.x @ self.weight

    def logps(self, logits: Tensor | None = None) -> Tensor:
        logits = self.logits() if logits is None else logits
        return logits.log_softmax(-1).gather(-1, self.labels[..., None]).squeeze(-1)

    def sums(self) -> Tensor:
        return (self.logps() * self.keep).sum(1)


def facts_of(loss: Loss, batch: int = 4, length: int = LENGTH, trained: bool = False, also: tuple[int, ...] = (1, 4)) -> Facts:
    """Compares with eager for a layer of attention in front of the head."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def function(x: Tensor, w: Tensor, weight: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
        q = (x @ w)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0] @ w
        return loss(Head(x, weight, labels, keep))

    x, w, weight = random(batch, length, WIDTH), random(WIDTH, WIDTH), random(WIDTH, VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (batch, length), generator=draw)
    keep = (torch.rand(batch, length, generator=draw) < 0.7).double()
    tensors = [x.requires_grad_(), w.requires_grad_(), weight.requires_grad_(trained), labels, keep]
    return compare_function(function, tensors, (3, *also), streams=None)


def in_one_pass(facts: Facts) -> bool:
    """Whether the head's gradient is found with the loss: no product with the vocabulary is left to the backward half."""
    last = facts.stages[-1]
    products = [node for node in facts.joint.nodes if node.target in PRODUCTS and VOCABULARY in _sizes(node)]
    own = {*last.forward, *last.backward}
    return bool(last.gradient_in_forward) and bool(products) and all(node in own for node in products)


def _sizes(node: Any) -> set[int]:
    return {size for item in (node, *node.all_input_nodes) for size in item.meta["val"].shape}


# -- multiples


def preferences(head: Head) -> Tensor:
    chosen, rejected = head.sums().chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def split_rows(head: Head) -> Tensor:
    sums = head.sums()
    half = len(sums) // 2
    return -F.logsigmoid(sums[:half] - sums[half:]).mean()


def squares(head: Head) -> Tensor:
    return head.sums().square().sum().sqrt()


def every_other(head: Head) -> Tensor:
    sums = head.sums().unflatten(0, (-1, 2))
    return torch.tanh(sums[:, 0] - sums[:, 1]).sum()


def normalized(head: Head) -> Tensor:
    return torch.exp(head.sums() / (head.keep.sum(1) + 1)).mean()


def of_all(head: Head) -> Tensor:
    """Each number depends on all sums."""
    return head.sums().softmax(0).square().sum()


def flattened(head: Head) -> Tensor:
    logits = head.x.flatten(0, 1) @ head.weight
    return head.logps(logits.unflatten(0, head.labels.shape)).sum(1).square().mean()


def flattened_sums(head: Head) -> Tensor:
    """Rows are flat until they are summed."""
    logps = (head.x.flatten(0, 1) @ head.weight).log_softmax(-1).gather(-1, head.labels.flatten()[:, None])
    return logps.reshape(head.labels.shape).sum(1).square().mean()


def time_first(head: Head) -> Tensor:
    logps = (head.x.transpose(0, 1) @ head.weight).log_softmax(-1).gather(-1, head.labels.t()[..., None])
    return logps.squeeze(-1).sum(0).square().mean()


def normed(head: Head) -> Tensor:
    x = F.layer_norm(head.x, (WIDTH,))
    return head.logps(x @ head.weight).sum(1).square().mean()


def spelled_norm(head: Head) -> Tensor:
    x = head.x * torch.rsqrt(head.x.square().mean(-1, keepdim=True) + 1e-6)
    return head.logps(x @ head.weight).sum(1).square().mean()


def capped(head: Head) -> Tensor:
    return head.logps(3 * torch.tanh(head.logits() / 3)).sum(1).square().mean()


def shifted(head: Head) -> Tensor:
    logps = head.logits()[:, :-1].log_softmax(-1).gather(-1, head.labels[:, 1:, None]).squeeze(-1)
    return (logps * head.keep[:, 1:]).sum(1).square().mean()


def logsumexps(head: Head) -> Tensor:
    logits = head.logits()
    return (logits.gather(-1, head.labels[..., None]).squeeze(-1) - logits.logsumexp(-1)).sum(1).square().mean()


def entropies(head: Head) -> Tensor:
    p = head.logits().log_softmax(-1)
    return (p.exp() * p).sum((1, 2)).square().mean()


def some_classes_hidden(head: Head) -> Tensor:
    hidden = torch.arange(VOCABULARY) == 1
    p = head.logits().masked_fill(hidden, -1e9).logsumexp(-1)
    return p.sum(1).square().mean()


MULTIPLES = (
    preferences,
    split_rows,
    squares,
    every_other,
    normalized,
    of_all,
    flattened,
    flattened_sums,
    time_first,
    normed,
    spelled_norm,
    capped,
    shifted,
    logsumexps,
    entropies,
    some_classes_hidden,
)


@pytest.mark.parametrize("loss", MULTIPLES)
def test_one_pass(loss: Loss) -> None:
    assert in_one_pass(facts_of(loss))


@pytest.mark.parametrize("loss", only([preferences, time_first], [preferences, of_all, flattened, time_first]))
@pytest.mark.parametrize(("batch", "length"), [(LENGTH, LENGTH), (WIDTH, WIDTH), (2, 2)])
def test_batches_as_long_as_the_sequence(loss: Loss, batch: int, length: int) -> None:
    assert in_one_pass(facts_of(loss, batch, length))


@pytest.mark.parametrize("loss", spread(MULTIPLES, 4))
def test_a_trained_head_runs_in_two_passes(loss: Loss) -> None:
    assert not in_one_pass(facts_of(loss, trained=True, also=()))


# -- a single number


def square_of_all(head: Head) -> Tensor:
    return head.sums().sum().square()


def one_sequence(head: Head) -> Tensor:
    return head.sums()[0].square()


@pytest.mark.parametrize("trained", [False, True])
def test_one_number_scales_weights_as_well(trained: bool) -> None:
    assert in_one_pass(facts_of(square_of_all, trained=trained))
    assert in_one_pass(facts_of(one_sequence, batch=1, trained=trained))


# -- no multiples


class Bent(torch.autograd.Function):
    """The identity, whose gradient is bent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.tanh(gradients[0])


def bent_gradients(head: Head) -> Tensor:
    return head.logps(Bent.apply(head.logits())).sum(1).square().mean()


def mixed_before(head: Head) -> Tensor:
    return head.logps((head.x + head.x.mean(0, keepdim=True)) @ head.weight).sum(1).square().mean()


def mixed_after(head: Head) -> Tensor:
    logits = head.logits()
    return head.logps(logits - logits.mean(0, keepdim=True)).sum(1).square().mean()


def mixed_by_a_matrix(head: Head) -> Tensor:
    logits = head.logits()
    mixing = torch.ones(len(logits), len(logits), dtype=logits.dtype).tril()
    return head.logps(torch.einsum("bc,ctv->btv", mixing, logits)).sum(1).square().mean()


def rolled(head: Head) -> Tensor:
    return head.logps(head.logits().roll(1, 0)).sum(1).square().mean()


def turned_around(head: Head) -> Tensor:
    logits = head.logits()
    return head.logps(logits + 0.5 * logits.flip(0)).sum(1).square().mean()


def running_sums(head: Head) -> Tensor:
    return head.logps(head.logits().cumsum(0)).sum(1).square().mean()


def normed_over_the_batch(head: Head) -> Tensor:
    return (head.logits().softmax(0) * head.keep[..., None]).sum((1, 2)).square().mean()


def across(head: Head) -> Tensor:
    """All pairs of sequences: the batch is there twice."""
    pairs = torch.einsum("btv,ctv->bct", head.logits(), head.logits())
    return pairs.tanh().sum(2).square().mean()


def of_each_token(head: Head) -> Tensor:
    """Each token's gradient has a number of its own."""
    return (head.logps() * head.sums()[:, None]).sum().tanh()


def halves(head: Head) -> Tensor:
    """The first half of the rows is summed into one, the others into another."""
    logps = head.logps()
    return logps[:, :3].sum(1).square().mean() + logps[:, 3:].sum(1).exp().mean()


def two_terms(head: Head) -> Tensor:
    logits = head.logits()
    return head.logps(logits).sum(1).square().mean() + F.cross_entropy(logits.flatten(0, 1), head.labels.flatten())


OTHERS = (
    bent_gradients,
    mixed_after,
    mixed_by_a_matrix,
    rolled,
    turned_around,
    running_sums,
    normed_over_the_batch,
    across,
    of_each_token,
    halves,
    two_terms,
)


@pytest.mark.parametrize("loss", OTHERS)
@pytest.mark.parametrize("batch", [4, LENGTH])
def test_no_multiple(loss: Loss, batch: int) -> None:
    assert not in_one_pass(facts_of(loss, batch))


def test_what_mixes_sequences_in_front_of_the_head_is_not_part_of_it() -> None:
    facts_of(mixed_before)
    facts_of(mixed_before, LENGTH)


# -- rows that are left out


def selected(head: Head) -> Tensor:
    return torch.where(head.labels > 1, head.logps(), 0).sum(1).square().mean()


def filled(head: Head) -> Tensor:
    return head.logps().masked_fill(head.labels < 2, 0).sum(1).square().mean()


def selected_logits(head: Head) -> Tensor:
    return head.logps(torch.where(head.labels[..., None] > 1, head.logits(), 0)).sum(1).square().mean()


def normalized_where_there_is_any(head: Head) -> Tensor:
    """A sequence of which nothing is selected has no length, and its gradient is zero in eager: what drives it is no number."""
    keep = head.labels > 100 * torch.arange(len(head.labels))[:, None]
    means = torch.where(keep, head.logps(), 0).sum(1) / keep.sum(1)
    return torch.where(keep.any(1), means.square(), 0).sum()


def filled_where_there_is_any(head: Head) -> Tensor:
    drop = head.labels <= 100 * torch.arange(len(head.labels))[:, None]
    means = head.logps().masked_fill(drop, 0).sum(1) / (~drop).sum(1)
    return means.square().masked_fill(drop.all(1), 0).sum()


@pytest.mark.parametrize("loss", [selected, filled, selected_logits, normalized_where_there_is_any, filled_where_there_is_any])
def test_selected_rows(loss: Loss) -> None:
    assert in_one_pass(facts_of(loss))


def selected_by_what_is_made(head: Head) -> Tensor:
    logps = head.logps()
    return torch.where(logps > -2, logps, 0).sum(1).square().mean()


def selected_twice(head: Head) -> Tensor:
    logps = torch.where(head.labels > 1, head.logps(), 0)
    return torch.where(head.labels < 5, logps, 0).sum(1).square().mean()


def selected_beside_all(head: Head) -> Tensor:
    logps = head.logps()
    return (torch.where(head.labels > 1, logps, 0) + 0.1 * logps).sum(1).square().mean()


@pytest.mark.parametrize("loss", [selected_by_what_is_made, selected_twice, selected_beside_all])
def test_other_selections(loss: Loss) -> None:
    assert not in_one_pass(facts_of(loss))


# -- drivers that are zero, or no numbers


def zero(head: Head) -> Tensor:
    return torch.relu(head.sums() - 1e3).sum()


def some_zero(head: Head) -> Tensor:
    sums = head.sums()
    return torch.relu(sums - sums.mean()).sum()


@pytest.mark.parametrize("loss", [zero, some_zero])
def test_drivers_that_are_zero(loss: Loss) -> None:
    assert in_one_pass(facts_of(loss))


def infinite(head: Head) -> Tensor:
    """The first sequence's driver is infinite, the others' are not."""
    large = torch.tensor([1.0, *[0.0] * (len(head.labels) - 1)], dtype=torch.float64) * 1e4
    sums = head.sums()
    return (large * -sums).exp().sum() + sums.square().sum()


def test_a_driver_that_is_infinite_shows() -> None:
    """What it reaches is no number in eager and here; rows of other sequences are untouched."""
    x, w, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 6, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCABULARY)))
    labels, keep = torch.randint(0, VOCABULARY, (3, 6)), torch.ones(3, 6, dtype=torch.float64)

    def function(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        q = (x @ w)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0] @ w
        return infinite(Head(x, *others))

    tensors = [x.requires_grad_(), w.requires_grad_(), weight, labels, keep]
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    recorded, _ = traced(function, tensors, chunk_size=3, loss_chunk_size=2)
    found = take_gradients(tensors)
    assert in_one_pass(recorded.facts[-1])
    for name in wanted:
        assert torch.equal(found[name].isfinite(), wanted[name].isfinite())  # type: ignore[union-attr]
    torch.testing.assert_close(found["0"][1:], wanted["0"][1:], rtol=1e-12, atol=1e-12)  # type: ignore[index]
