"""When a deferred tensor is computed, what that costs, when it is freed, and what becomes of it when a parameter changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx import StaleOutputError
from streamfx.lazy import recompute, steps
from streamfx.lazy.deferred import DeferredTensor
from streamfx.lazy.recompute import RecomputeSource
from streamfx.runtime.outer import OuterRunner
from tests.support.deferred import OPTIONS, WEIGHTS, Compiled, assert_same, gradients, own_loss
from tests.support.heads import BATCH, LENGTH, VOCABULARY, capped_head, decoder, plain_head, some_ids


def test_it_is_computed_once_and_only_when_its_values_are_needed(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = count_calls(monkeypatch, RecomputeSource, "_recorded")
    logits = compiled.deferred()
    pytree.tree_map(lambda x: x.detach(), {"logits": [logits]})
    lazy = [logits.detach(), logits.float(), logits[:, -1], logits[0, :3].bfloat16()]
    assert all(isinstance(item, DeferredTensor) for item in lazy)
    assert isinstance(logits, Tensor)
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert not computed
    logits.argmax(-1)
    logits.float().sum()
    (logits * WEIGHTS).sum().backward()
    assert len(computed) == 1


def test_few_rows_are_computed_by_themselves(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LEAST", BATCH * LENGTH * VOCABULARY)  # the logits are large, and parts of them are not
    whole = count_calls(monkeypatch, RecomputeSource, "rebuild")
    rows = count_calls(monkeypatch, RecomputeSource, "rebuild_rows")
    logits, dense = compiled.deferred(), compiled.dense().detach()
    assert_same(logits[:, -2:].exp().detach(), dense[:, -2:].exp())
    assert_same(logits.float()[:, 1:7:2].exp().detach(), dense.float()[:, 1:7:2].exp(), 1e-6)
    assert (len(rows), len(whole)) == (2, 0)
    assert_same(logits[:, 1:].exp().detach(), dense[:, 1:].exp())
    logits[:, 0].sum()
    assert (len(rows), len(whole)) == (2, 1)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_it_is_freed_with_its_last_reference(compiled: Compiled) -> None:
    gc.disable()
    try:
        logits = compiled.deferred()
        (logits.exp() * logits).sum().backward()
        references = [weakref.ref(item) for item in (logits._cell.value, logits._cell.source, logits._cell)]  # type: ignore[attr-defined]
        del logits
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The numbers of elements of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += [item.numel() for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
        return result


@pytest.mark.parametrize("head", [plain_head, capped_head])
def test_no_tensor_of_all_logits_exists_when_only_the_loss_is_used(
    head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the logits nor their gradient, in the forward and the backward."""
    model, ids, sizes, run = decoder(head), some_ids(64), Sizes(), OuterRunner.__call__

    def watched(self: OuterRunner, arguments: list[Any]) -> Any:
        with sizes:
            return run(self, arguments)

    monkeypatch.setattr(OuterRunner, "__call__", watched)
    loss, logits = torch.compile(model, backend="streambp", options=OPTIONS)(ids, ids)
    loss.backward()
    assert logits.numel() == BATCH * 64 * VOCABULARY
    assert sizes.made
    assert max(sizes.made) < logits.numel()


def test_dense_outputs_are_plain() -> None:
    model = decoder()
    compiled = torch.compile(model, backend="streambp", options={**OPTIONS, "outputs": "dense"})
    results = []
    for function in (compiled, model):
        loss, logits = function(some_ids(), some_ids())
        (loss + own_loss(logits, some_ids())).backward()
        assert type(logits) is Tensor
        results.append((loss, logits, gradients(model)))
    assert_same(results[0], results[1])


def test_what_is_small_beside_its_weights_is_made_in_the_call(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of a text that is generated: to read the weight again for a check would take as long as to make it."""
    monkeypatch.setattr(recompute, "SMALL", 0)
    logits, dense = compiled.deferred(), compiled.dense()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    assert_same(logits.detach() * 1, dense.detach())


# -- changed parameters


def test_a_changed_parameter_is_noticed(compiled: Compiled) -> None:
    logits = compiled.deferred()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    with pytest.raises(StaleOutputError) as raised:
        logits.argmax(-1)
    text = str(raised.value)
    assert "is computed when it is first used" in text
    assert "weight was changed in place since the call (1 time)" in text
    assert '"outputs": "dense"' in text
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)


def test_a_parameter_may_change_after_the_first_use(compiled: Compiled) -> None:
    logits, dense = compiled.deferred(), compiled.dense().detach()
    logits.sum()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    assert_same(logits.detach() * 1, dense)


def test_a_parameter_may_be_given_other_data(compiled: Compiled) -> None:
    """The deferred tensor keeps the memory that the parameter had in the call."""
    logits, dense = compiled.deferred(), compiled.dense().detach()
    weight = compiled.model.weight
    weight.data, before = torch.zeros_like(weight), weight.data
    try:
        assert_same(logits.detach() * 1, dense)
    finally:
        weight.data = before


def test_a_training_loop_is_exact() -> None:
    losses = []
    for compiled in (True, False):
        model = decoder()
        function = torch.compile(model, backend="streambp", options=OPTIONS) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(3):
            loss, logits = function(some_ids(), some_ids())
            (loss + logits.logsumexp(-1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert_same(losses[:3], losses[3:])
