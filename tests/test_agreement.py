"""Deferred outputs agree with themselves: what one pass over them gives is found again in what another pass makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from streamfx.lazy.deferred import DeferredTensor
from tests.support.spread import only
from tests.test_uses_of_outputs import VOCABULARY, Model, made, small_values_are_large, some_ids

__all__ = ["small_values_are_large"]


def logits_of(beside: Callable[[Tensor], Any] | None = None) -> tuple[Model, Any]:
    model, compiled = made(beside)
    return model, compiled(some_ids())


def kth(logits: Tensor, k: int = 50) -> Tensor:
    return logits.topk(k).values[..., -1:]


def nucleus(logits: Tensor, p: float = 0.9) -> Tensor:
    probabilities = logits.softmax(-1)
    ordered = probabilities.sort(-1, descending=True).values
    return ordered.gather(-1, (ordered.cumsum(-1) < p).sum(-1, keepdim=True))


# what is compared: each gives a mask, whose number of hits per token is known
HITS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "amax": (lambda x: x == x.amax(-1, keepdim=True), 1),
    "top-k": (lambda x: x >= kth(x), 50),
    "kthvalue": (lambda x: x <= x.kthvalue(7, -1, keepdim=True).values, 7),
    "median": (lambda x: x == x.median(-1, keepdim=True).values, 1),
    "sort": (lambda x: x >= x.sort(-1).values[..., 100:101], VOCABULARY - 100),
    "argmax, gathered": (lambda x: x >= x.gather(-1, x.argmax(-1, keepdim=True)), 1),
    "rank of a token": (lambda x: x == x.gather(-1, some_ids()[..., None]), 1),
    "a probability": (lambda x: x.softmax(-1) == x.softmax(-1).amax(-1, keepdim=True), 1),
    "rows, then all": (lambda x: (x == x[:, 9:10].amax(-1, keepdim=True))[:, 9:10], 1),
    "all, then a few rows": (lambda x: x[:, 9:12] == x.amax(-1, keepdim=True)[:, 9:12], 1),
    "whole, later": (lambda x: x.amax(-1, keepdim=True).flip(1) == x.flip(1), 1),
    "through numbers": (lambda x: x == torch.tensor(x.amax(-1).tolist(), dtype=x.dtype)[..., None], 1),
}
EVERY_TIME = ["amax", "top-k", "kthvalue", "a probability", "rows, then all", "all, then a few rows", "whole, later"]


@torch.no_grad()
@pytest.mark.parametrize("name", only(EVERY_TIME, HITS))
def test_what_was_found_is_found_again(name: str) -> None:
    hits, count = HITS[name]
    _, logits = logits_of()
    assert isinstance(logits, DeferredTensor)
    found = hits(logits).sum(-1)
    source = logits._cell.source
    assert source is not None
    assert source.agreement.in_chunks
    assert (found == count).all(), (found != count).sum()


@torch.no_grad()
def test_a_use_that_streams_along_another_axis_makes_all_of_it_whole() -> None:
    """The largest of each column: sequences could be chunks, in which products have other numbers of rows."""
    _, logits = logits_of()
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) == 1).all()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(-1).mean(),
    "margin": lambda x: F.relu(x - x.amax(-1, keepdim=True) + 0.5).sum(-1).mean(),
    "top-k filter": lambda x: x.masked_fill(x < kth(x), float("-inf")).logsumexp(-1).mean(),
    "top-p filter": lambda x: x.masked_fill(x.softmax(-1) < nucleus(x.detach()), float("-inf")).logsumexp(-1).mean(),
    "maximum": lambda x: torch.maximum(x, kth(x.detach())).square().mean(),
}


@pytest.mark.parametrize("name", only(["margin", "top-k filter"], LOSSES))
def test_gradients_know_what_was_chosen(name: str) -> None:
    model, logits = logits_of()
    found = []
    for one in (logits, model(some_ids())):
        model.zero_grad()
        value = LOSSES[name](one)
        value.backward()
        found.append([value.detach() * 1, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-10 * theirs.norm()


BESIDE: dict[str, Callable[[Tensor], Any]] = {
    "maxima": lambda x: x.amax(-1),
    "log-probabilities": lambda x: x.log_softmax(-1)[..., 7],
}
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "the maximum": lambda x: x.max(),
    "the largest log-probability": lambda x: x.log_softmax(-1).max(),
    "the mean of one element": lambda x: x[:1, -1].amax(-1).mean(),
    "the largest of one row": lambda x: x[:1, -1].topk(5).values[:, -1].sum(),
    "infinity norm": lambda x: x.norm(p=torch.inf),
}


@pytest.mark.parametrize("name", only(["maxima", "the largest of one row"], [*BESIDE, *NUMBERS]))
def test_what_the_model_returned_is_found_among_its_logits(name: str) -> None:
    """It was rounded with the rows of a loop: what it is compared with has to be, too."""
    beside = {**BESIDE, **NUMBERS}[name]
    _, (logits, told) = logits_of(beside)
    assert name in BESIDE or not isinstance(logits, DeferredTensor)
    assert (beside(logits) == told).all()


def test_a_loss_tells_nothing_of_single_logits() -> None:
    _, (logits, _) = logits_of(lambda logits: F.cross_entropy(logits.flatten(0, 1), some_ids().flatten()))
    assert isinstance(logits, DeferredTensor)


@torch.no_grad()
def test_other_threads_and_other_modes_between_two_uses() -> None:
    _, logits = logits_of()
    maxima = logits.amax(-1, keepdim=True)
    torch.set_num_threads(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert ((logits == maxima).sum(-1) == 1).all()
    assert torch.get_num_threads() == 2
