"""Deferred outputs: which they are, that they are exact, when they are computed, and how they react to changed weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from streamfx import StaleOutputError
from streamfx.errors import NotStreamedError
from streamfx.frontend.backend import Compilation
from streamfx.lazy import defer_outputs, recompute, steps
from streamfx.lazy.deferred import DeferredTensor
from streamfx.lazy.recompute import RecomputeSource
from streamfx.options import resolve_options
from tests.support.calls import noted
from tests.support.deferred import OPTIONS, WEIGHTS, Compiled, assert_same, gradients
from tests.support.heads import BATCH, HEADS, LENGTH, MIXED, VOCABULARY, Decoder, capped_head, decoder, some_ids
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled


def dynamo_graph(model: nn.Module, *arguments: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        graphs.append(module)
        return module

    torch.compile(model, backend=backend)(*arguments)
    return graphs[0]


def recipe_of(head: Callable[..., Any]) -> Any:
    deferral = defer_outputs(dynamo_graph(decoder(head), some_ids()))
    return None if deferral is None else deferral.plan.recipes[0]


def test_a_head_is_recognized_for_any_transpose_of_its_weight() -> None:
    """Dynamo writes an attribute as one until torch 2.13, later as an operator."""
    aten = torch.ops.aten
    operators = [aten.numpy_T, aten.matrix_H, aten.mT, aten.mH, aten.adjoint, aten.t, aten.t.default, torch.t, torch.adjoint]
    written = [lambda w: w.T, lambda w: w.mT, lambda w: w.H, lambda w: w.mH, lambda w: w.t(), lambda w: w.adjoint()]
    with_dims = [lambda w: w.transpose(0, 1), lambda w: w.swapaxes(0, 1), lambda w: w.permute(1, 0), lambda w: w.movedim(0, 1)]
    for turn in (*operators, *written, *with_dims):
        torch._dynamo.reset()
        rows = recipe_of(lambda model, x, ids, turn=turn: x @ turn(model.weight)).rows
        assert rows is not None and rows.dims == (0, 1, None), turn


def test_an_error_in_the_search_leaves_outputs_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: fx.GraphModule) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("streamfx.frontend.backend.defer_outputs", broken)
    module = dynamo_graph(decoder(), some_ids())
    assert Compilation(module, resolve_options()).deferral() is None
    with pytest.raises(NotStreamedError, match="KeyError: 'lost'"):
        Compilation(module, resolve_options({"strict": True})).deferral()


# -- they are exact

ALONE = ["linear", "weights made of rows", "all rows added", *MIXED]


@pytest.mark.parametrize("name", only([*ALONE[:2], "less the mean over time", "a norm behind a mean over time"], ALONE))
def test_rows_that_are_read_alone_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for logits too large to compute in full, with a norm before the head that reads other rows."""
    monkeypatch.setattr(steps, "MIN_NUMEL", 1)
    model = decoder(HEADS[name][0])
    for ids in (some_ids(60)[:1], some_ids(60)):
        compiled = torch.compile(model, backend="streambp", options=OPTIONS, dynamic=False)
        for read in (lambda logits: logits[:, -1], lambda logits: logits[:, 3:9] * 1, lambda logits: logits[-1, 5].argmax(-1)):
            with torch.no_grad():
                torch.testing.assert_close(read(compiled(ids)) * 1, read(model(ids)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", only(["less the largest", "less the third", "capped beside the largest", "detached"], HEADS))
def test_heads_are_exact(name: str) -> None:
    """Outputs, and gradients of the loss alone and of all outputs, equal eager's; as many as expected are deferred."""
    head, number = HEADS[name]
    model, ids = decoder(head), some_ids()
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)
    results = []
    for function in (compiled, model):
        outputs = function(ids, ids)
        if function is compiled:
            assert sum(isinstance(output, DeferredTensor) for output in outputs) == number
            assert outputs[-1] is outputs[1] or name != "twice the same"
        outputs[0].backward(retain_graph=True)
        of_loss = gradients(model)
        weighted = [(o * torch.arange(o.numel()).view(o.shape)).sum() for o in outputs[1:] if o.requires_grad]
        (outputs[0] + sum(weighted)).backward()
        results.append((outputs, of_loss, gradients(model)))
    assert_same(results[0], results[1])


# -- when they are computed, and at which cost


def test_a_deferred_output_is_computed_once_if_its_values_are_used(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = noted(monkeypatch, RecomputeSource, "_run_and_record")
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


def test_a_few_rows_are_computed_without_the_others(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MIN_NUMEL", BATCH * LENGTH * VOCABULARY)  # the logits are large, and parts of them are not
    whole, rows = (noted(monkeypatch, RecomputeSource, name) for name in ("recompute", "recompute_rows"))
    logits, dense = compiled.deferred(), compiled.dense().detach()
    assert_same(logits[:, -2:].exp().detach(), dense[:, -2:].exp())
    assert_same(logits.float()[:, 1:7:2].exp().detach(), dense.float()[:, 1:7:2].exp(), 1e-6)
    assert (len(rows), len(whole)) == (2, 0)
    assert_same(logits[:, 1:].exp().detach(), dense[:, 1:].exp())
    logits[:, 0].sum()
    assert (len(rows), len(whole)) == (2, 1)


# -- changed weights: outputs keep their values, or raise `StaleOutputError`


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


def fused_step(model: Decoder) -> None:
    """It changes memory without changing version counters."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def one_element(model: Decoder) -> None:
    model.weight.data[3, 5] += 1e-9


def filled(model: Decoder, values: Tensor) -> None:
    """As if a shard is gathered again: free the memory, then fill it."""
    storage = model.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    model.weight.data.copy_(values)


def swapped(model: Decoder) -> None:
    other = nn.Parameter(torch.zeros_like(model.weight))
    try:
        torch.utils.swap_tensors(model.weight, other)
    except RuntimeError:  # torch does not, while a graph holds one of them
        model.weight = other


STALE: dict[str, Callable[[Decoder], object]] = named_cases("stale", globals(), "model")
SAME: dict[str, Callable[[Decoder], object]] = named_cases("same", globals(), "model")


@pytest.mark.parametrize("name", STALE)
def test_using_an_output_after_a_weight_changed_raises(shifted: Compiled, name: str) -> None:
    logits, loss = shifted.deferred(), shifted.deferred().sum()
    STALE[name](shifted.model)
    for use in (lambda: logits.argmax(-1), lambda: logits[:, -1] * 1, lambda: logits.sum().backward()):
        with pytest.raises(StaleOutputError):
            use()
    with pytest.raises((StaleOutputError, RuntimeError)):  # torch's own error, where a counter shows it
        loss.backward()


@pytest.mark.parametrize("name", SAME)
def test_replaced_weights_do_not_change_an_output(shifted: Compiled, name: str) -> None:
    logits, dense = shifted.deferred(), shifted.dense().detach()
    SAME[name](shifted.model)
    assert_same(logits.detach() * 1, dense)


def test_the_stale_output_error_explains_itself(compiled: Compiled) -> None:
    """If it changes before the first use."""
    logits, used, dense = compiled.deferred(), compiled.deferred(), compiled.dense().detach()
    used.sum()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    with pytest.raises(StaleOutputError) as raised:
        logits.argmax(-1)
    text = str(raised.value)
    assert "is computed when it is first used" in text
    assert "weight was changed in place since the call (1 time)" in text
    assert '"outputs": "dense"' in text
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert_same(used.detach() * 1, dense)


def test_an_output_smaller_than_its_weights_is_computed_in_the_call(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """One generated token: a check that reads the weight would take as long as the computation."""
    monkeypatch.setattr(recompute, "MIN_INPUT_RATIO", 0)
    logits, dense = compiled.deferred(), compiled.dense()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    assert_same(logits.detach() * 1, dense.detach())
