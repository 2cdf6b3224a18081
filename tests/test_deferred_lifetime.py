"""When a deferred tensor is computed, what that costs, when it is freed, and what becomes of it when a weight changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from streamfx import StaleOutput
from streamfx.lazy import rebuild, steps
from streamfx.lazy.deferred import DeferredTensor
from streamfx.lazy.rebuild import Source
from tests.support.deferred import OPTIONS, WEIGHTS, Compiled, assert_same
from tests.support.heads import BATCH, LENGTH, VOCABULARY, Decoder, capped_head, decoder, plain_head, some_ids
from tests.test_live_bytes import Shapes


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls: list[None] = []
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(None) or method(*args, **kwargs))
    return calls


def test_it_is_computed_once_and_only_when_its_values_are_needed(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = count_calls(monkeypatch, Source, "_recorded")
    logits = compiled.deferred()
    pytree.tree_map(lambda x: x.detach(), {"logits": [logits]})
    lazy = [logits.detach(), logits.float(), logits[:, -1], logits[0, :3].bfloat16()]
    assert all(isinstance(item, DeferredTensor) for item in lazy)
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert not computed
    logits.argmax(-1)
    logits.float().sum()
    (logits * WEIGHTS).sum().backward()
    assert len(computed) == 1


def test_few_rows_are_computed_by_themselves(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LEAST", BATCH * LENGTH * VOCABULARY)  # the logits are large, and parts of them are not
    whole, rows = (count_calls(monkeypatch, Source, name) for name in ("rebuild", "rebuild_rows"))
    logits, dense = compiled.deferred(), compiled.dense().detach()
    assert_same(logits[:, -2:].exp().detach(), dense[:, -2:].exp())
    assert_same(logits.float()[:, 1:7:2].exp().detach(), dense.float()[:, 1:7:2].exp(), 1e-6)
    assert (len(rows), len(whole)) == (2, 0)
    assert_same(logits[:, 1:].exp().detach(), dense[:, 1:].exp())
    logits[:, 0].sum()
    assert (len(rows), len(whole)) == (2, 1)


@pytest.mark.parametrize("head", [plain_head, capped_head])
def test_no_tensor_of_all_logits_exists_when_only_the_loss_is_used(head: Callable[..., Any]) -> None:
    """Neither the logits nor their gradient, in the forward and the backward."""
    compiled, ids = torch.compile(decoder(head), backend="streambp", options=OPTIONS), some_ids(64)
    compiled(ids, ids)[0].backward()
    with Shapes() as shapes:
        loss, logits = compiled(ids, ids)
        loss.backward()
    assert shapes.made and max(torch.Size(shape).numel() for shape in shapes.made) < logits.numel() == BATCH * 64 * VOCABULARY


# -- changed weights, in every way that torch has: the outputs are what they were, or raise `StaleOutput`


def shifted_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return capped_head(model, x, ids) + model.get_buffer("mask")


@pytest.fixture(scope="module")
def shifted_once() -> Compiled:
    return Compiled(decoder(shifted_head), "grad")


@pytest.fixture
def shifted(shifted_once: Compiled) -> Compiled:
    """One compilation, with a model of its own for each test."""
    fresh = copy.copy(shifted_once)
    fresh.model = copy.deepcopy(shifted_once.model)
    tensors = {id(old): new for old, new in zip(parts(shifted_once.model), parts(fresh.model), strict=True)}
    fresh._inputs = [tensors.get(id(value), value) for value in shifted_once._inputs]
    return fresh


def parts(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def optimized(kind: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[[Decoder], object]:
    def change(model: Decoder) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(model.parameters(), lr=0.1, **options).step()

    return change


def one_element(model: Decoder) -> None:
    model.weight.data[3, 5] += 1e-9


def swapped(model: Decoder) -> None:
    model.weight.untyped_storage().copy_((2 * model.weight.detach()).untyped_storage())


def given(model: Decoder, values: Tensor) -> None:
    """As a shard is gathered again: the memory freed, and filled anew."""
    storage = model.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    model.weight.data.copy_(values)


def exchanged(model: Decoder) -> None:
    other = nn.Parameter(torch.zeros_like(model.weight))
    try:
        torch.utils.swap_tensors(model.weight, other)
    except RuntimeError:  # torch does not, while a graph holds one of them
        model.weight = other


STALE: dict[str, Callable[[Decoder], object]] = {
    **{
        f"{kind.__name__}, fused": optimized(kind, fused=True)
        for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    },
    "AdamW, for each": optimized(torch.optim.AdamW, foreach=True),
    "AdamW": optimized(torch.optim.AdamW, foreach=False),
    "data.neg_": lambda model: model.weight.data.neg_(),
    "data, rows in another order": lambda model: model.weight.data.copy_(model.weight.flip(0)),
    "data, one element": one_element,
    "numpy": lambda model: model.weight.detach().numpy().fill(0.5),
    "dlpack": lambda model: torch.utils.dlpack.from_dlpack(model.weight.detach()).mul_(2.0),
    "foreach on data": lambda model: torch._foreach_add_([p.data for p in model.parameters()], 1.0),
    "memory written": swapped,
    "memory freed": lambda model: model.weight.untyped_storage().resize_(0),
    "memory freed, then filled with others": lambda model: given(model, torch.randn_like(model.weight)),
    "a buffer": lambda model: model.get_buffer("mask").data.neg_(),
}
SAME: dict[str, Callable[[Decoder], object]] = {
    "data =": lambda model: setattr(model.weight, "data", torch.zeros_like(model.weight)),
    "another parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros_like(model.weight))),
    "assigned states": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True),
    "another type": lambda model: model.float(),
    "memory freed, then filled with the same": lambda model: given(model, model.weight.detach().clone()),
    "tensors swapped": exchanged,
}


@pytest.mark.parametrize("name", STALE)
def test_a_change_is_noticed(shifted: Compiled, name: str) -> None:
    logits, loss = shifted.deferred(), shifted.deferred().sum()
    STALE[name](shifted.model)
    for use in (lambda: logits.argmax(-1), lambda: logits[:, -1] * 1, lambda: logits.sum().backward()):
        with pytest.raises(StaleOutput):
            use()
    with pytest.raises((StaleOutput, RuntimeError)):  # torch's own error, where a counter shows it
        loss.backward()


@pytest.mark.parametrize("name", SAME)
def test_values_that_are_kept_elsewhere_are_those_of_the_call(shifted: Compiled, name: str) -> None:
    logits, dense = shifted.deferred(), shifted.dense().detach()
    SAME[name](shifted.model)
    assert_same(logits.detach() * 1, dense)


def test_a_changed_parameter_is_noticed(compiled: Compiled) -> None:
    """If it changes before the first use."""
    logits, used, dense = compiled.deferred(), compiled.deferred(), compiled.dense().detach()
    used.sum()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    with pytest.raises(StaleOutput) as raised:
        logits.argmax(-1)
    text = str(raised.value)
    assert "is computed when it is first used" in text
    assert "weight was changed in place since the call (1 time)" in text
    assert '"outputs": "dense"' in text
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert_same(used.detach() * 1, dense)


def test_what_is_small_beside_its_weights_is_made_in_the_call(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of a text that is generated: to read the weight again for a check would take as long as to make it."""
    monkeypatch.setattr(rebuild, "SMALL", 0)
    logits, dense = compiled.deferred(), compiled.dense()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    assert_same(logits.detach() * 1, dense.detach())
