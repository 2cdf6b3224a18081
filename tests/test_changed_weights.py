"""Deferred outputs after a weight has changed, in every way that torch has: they are what they were, or raise `StaleOutputError`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from streamfx import StaleOutputError
from tests.support.deferred import Compiled, assert_same
from tests.support.heads import Decoder, capped_head, decoder


def optimized(kind: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[[Decoder], object]:
    def change(model: Decoder) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(model.parameters(), lr=0.1, **options).step()

    return change


def one_element(model: Decoder) -> None:
    model.weight.data[3, 5] += 1e-9


def foreach(model: Decoder) -> None:
    torch._foreach_add_([p.data for p in model.parameters()], 1.0)


def from_another_tensor(model: Decoder) -> None:
    torch.utils.dlpack.from_dlpack(model.weight.detach()).mul_(2.0)


def given(model: Decoder, values: Tensor) -> None:
    """As a shard is gathered again: the memory freed, and filled anew."""
    storage = model.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    model.weight.data.copy_(values)


def freed(model: Decoder) -> None:
    model.weight.untyped_storage().resize_(0)


def swapped(model: Decoder) -> None:
    mine = model.weight.detach().clone()
    model.weight.untyped_storage().copy_((2 * mine).untyped_storage())


STALE: dict[str, Callable[[Decoder], object]] = {
    "AdamW, fused": optimized(torch.optim.AdamW, fused=True),
    "Adam, fused": optimized(torch.optim.Adam, fused=True),
    "SGD, fused": optimized(torch.optim.SGD, fused=True),
    "Adagrad, fused": optimized(torch.optim.Adagrad, fused=True),
    "AdamW, for each": optimized(torch.optim.AdamW, foreach=True),
    "AdamW": optimized(torch.optim.AdamW, foreach=False),
    "data.mul_": lambda model: model.weight.data.mul_(2.0),
    "data.neg_": lambda model: model.weight.data.neg_(),
    "data, rows in another order": lambda model: model.weight.data.copy_(model.weight.flip(0)),
    "data, one element": one_element,
    "numpy": lambda model: model.weight.detach().numpy().fill(0.5),
    "dlpack": from_another_tensor,
    "foreach on data": foreach,
    "memory written": swapped,
    "memory freed": freed,
    "memory freed, then filled with others": lambda model: given(model, torch.randn_like(model.weight)),
    "a buffer": lambda model: model.get_buffer("mask").data.neg_(),
}
SAME: dict[str, Callable[[Decoder], object]] = {
    "nothing": lambda model: None,
    "data =": lambda model: setattr(model.weight, "data", torch.zeros_like(model.weight)),
    "another parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros_like(model.weight))),
    "assigned states": lambda model: (
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True) and None
    ),
    "another type": lambda model: model.float(),
    "memory freed, then filled with the same": lambda model: given(model, model.weight.detach().clone()),
}


def shifted_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return capped_head(model, x, ids) + model.get_buffer("mask")


@pytest.fixture(scope="module")
def compilation() -> Compiled:
    return Compiled(decoder(shifted_head), "grad")


@pytest.fixture
def compiled(compilation: Compiled) -> Compiled:
    """One compilation, with a model of its own for each test."""
    fresh = copy.copy(compilation)
    fresh.model = copy.deepcopy(compilation.model)
    tensors = {id(old): new for old, new in zip(parts(compilation.model), parts(fresh.model), strict=True)}
    fresh._inputs = [tensors.get(id(value), value) for value in compilation._inputs]
    return fresh


def parts(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("name", STALE)
def test_a_change_is_noticed(compiled: Compiled, name: str) -> None:
    logits, loss = compiled.deferred(), compiled.deferred().sum()
    STALE[name](compiled.model)
    for use in (lambda: logits.argmax(-1), lambda: logits[:, -1] * 1, lambda: logits.sum().backward()):
        with pytest.raises(StaleOutputError):
            use()
    with pytest.raises((StaleOutputError, RuntimeError)):  # torch's own error, where a counter shows it
        loss.backward()


@pytest.mark.parametrize("name", SAME)
def test_values_that_are_kept_elsewhere_are_those_of_the_call(compiled: Compiled, name: str) -> None:
    logits, dense = compiled.deferred(), compiled.dense().detach()
    SAME[name](compiled.model)
    assert_same(logits.detach() * 1, dense)


def test_tensors_may_be_swapped(compiled: Compiled) -> None:
    logits, dense = compiled.deferred(), compiled.dense().detach()
    other = nn.Parameter(torch.zeros_like(compiled.model.weight))
    try:
        torch.utils.swap_tensors(compiled.model.weight, other)
    except RuntimeError:  # torch does not, while a graph holds one of them
        compiled.model.weight = other
    assert_same(logits.detach() * 1, dense)
