"""Gradients through deferred tensors: equal eager's, however the backward is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import streamfx
from streamfx.lazy import deferred, steps
from tests.support.deferred import IDS, OPTIONS, WEIGHTS, Compiled, assert_behaves, assert_same, gradients
from tests.support.heads import VOCABULARY, Decoder, decoder, some_ids


class Exponential(torch.autograd.Function):
    """As fused losses are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


def backward_twice(x: Tensor) -> None:
    total = (x * WEIGHTS).sum()
    total.backward(retain_graph=True)
    total.backward()


def backward_with_hook(x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)  # type: ignore[func-returns-value]
    (x * WEIGHTS).sum().backward()
    return seen


def backward_with_retained(x: Tensor) -> Tensor | None:
    x.retain_grad()
    (x * WEIGHTS).sum().backward()
    return x.grad


def backward_after_write(x: Tensor) -> None:
    x[:, 0].mul_(x[:, 1].detach().clone())
    x[:, :, 3] = 0.0
    (x * WEIGHTS).sum().backward()


def backward_of_stale(x: Tensor) -> None:
    total = (x * x).sum()
    x.add_(1)
    total.backward()


def backward_after_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        best = x.argmax(-1).sum().item()
    (x * WEIGHTS).sum().backward()
    return torch.tensor(best)


def backward_checkpointed(x: Tensor, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    checkpoint(lambda x: (x.tanh() * WEIGHTS).sum(), x, use_reentrant=reentrant).backward()


def backward_saved_on_cpu(x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        total = (x.exp() * x * WEIGHTS).sum()
    total.backward()


def backward_of_view_before_write(x: Tensor) -> Tensor:
    """The view's first use is one that has no gradient."""
    last = x[:, -1]
    x.mul_(2)
    best = last.argmax(-1)
    (last * WEIGHTS[:, -1]).sum().backward()
    return best


def backward_of_view_with_hook(x: Tensor) -> None:
    """A write that autograd does not see leaves the view its history."""
    part = x[:, 1:]
    part.register_hook(lambda gradient: gradient * 1.5)
    x.data.mul_(0.75)
    (part.square() * WEIGHTS[:, 1:]).sum().backward()


BACKWARDS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: (x * WEIGHTS).sum().backward(),
    "its own": lambda x: x.backward(WEIGHTS),
    "autograd.backward": lambda x: torch.autograd.backward([x], [WEIGHTS]),
    "autograd.grad": lambda x: torch.autograd.grad((x * WEIGHTS).sum(), [x]),
    "a row": lambda x: (x[:, -1] ** 3).sum().backward(),
    "a cast and the whole": lambda x: (x[:, -1].double().exp().sum() + (x.softmax(-1) * WEIGHTS).sum()).backward(),
    "a custom function": lambda x: Exponential.apply(x).backward(),
    "twice, retained": backward_twice,
    "twice, freed": lambda x: [(x * WEIGHTS).sum().backward() for _ in range(2)],
    "a hook": backward_with_hook,
    "a retained gradient": backward_with_retained,
    "after a write": backward_after_write,
    "of a value that was then written into": backward_of_stale,
    "of a view with a hook, past autograd": backward_of_view_with_hook,
    "of a view taken before a write": backward_of_view_before_write,
    "after a touch in inference mode": backward_after_inference,
    "reentrant checkpoint": lambda x: backward_checkpointed(x, True),
    "checkpoint": lambda x: backward_checkpointed(x, False),
    "saved on the host": backward_saved_on_cpu,
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_through_it(compiled: Compiled, name: str) -> None:
    assert_behaves(compiled, BACKWARDS[name])


def test_what_was_turned_in_place_may_be_read(compiled: Compiled) -> None:
    """By operators that write elsewhere, too."""
    with torch.no_grad():
        logits, dense = compiled.deferred(), compiled.dense()
        for x in (logits, dense):
            x[:, 1:].sum()
            x.transpose_(0, 1)
    plain = torch.empty(())
    assert_same(torch.sum(logits.detach(), dim=(0, 1, 2), out=plain.double()), dense.detach().sum())


def test_a_view_of_what_was_written_is_used_without_a_gradient(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its history is written anew when it is asked for, which only autograd can do."""
    monkeypatch.setattr(steps, "LEAST", 1)
    logits = compiled.deferred()
    last = logits[:, -1]
    logits.mul_(2)
    assert_same(last.detach() * 1, compiled.dense()[:, -1].detach() * 2)


TURNED: dict[str, Callable[[Tensor], Any]] = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("writes_to_view", [True, False])
def test_what_was_turned_in_place_is_not_written_to(compiled: Compiled, name: str, writes_to_view: bool) -> None:
    """Autograd would view the turned base again for the gradient of a view that was taken before."""
    logits = compiled.deferred()
    part = logits[:, 1:]
    TURNED[name](logits)
    with pytest.raises(streamfx.TransposedOutputError, match="turned in place"):
        (part if writes_to_view else logits).mul_(0.5)
    (logits * 2.0).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "streambp"])
def test_as_argument_of_another_compiled_function(compiled: Compiled, backend: str) -> None:
    def consumer(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.cross_entropy(x.transpose(1, 2) * 2, IDS[..., 0]), x.detach()[:, 0], x.argmax(-1)

    function = torch.compile(consumer, backend=backend, fullgraph=True)

    def use(x: Tensor) -> tuple[Tensor, ...]:
        loss, *others = function(x)
        loss.backward()
        return loss.detach(), *(other * 1 for other in others)

    assert_behaves(compiled, use)


def biased_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return F.linear(x, model.weight, model.bias)


@pytest.mark.parametrize("rows", [lambda x: x[:, -1], lambda x: x, lambda x: x.split(4, 1)[1]], ids=["last", "all", "split"])
def test_where_nothing_is_made_in_chunks(rows: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after many graphs in one process, or where a gradient does not stream: autograd is given plain tensors all the same."""
    monkeypatch.setattr(steps, "LEAST", 8)
    monkeypatch.setattr(deferred, "gradients_in_chunks", lambda source, gradient: None)
    results = []
    for lazily in (True, False):
        model = decoder(biased_head)
        function = torch.compile(model, backend="streambp", options=OPTIONS) if lazily else model
        ids = torch.arange(240).reshape(4, 60) * 7 % VOCABULARY  # so many that what the head reads is small beside the logits
        loss = rows(function(ids)).logsumexp(-1).sum()
        loss.backward()
        results.append([loss.detach(), gradients(model)])
    assert_same(results[0], results[1])


def test_across_a_graph_break() -> None:
    model = decoder()

    def step(ids: Tensor) -> tuple[Tensor, str]:
        logits = model(ids)
        torch._dynamo.graph_break()
        text = repr(logits.detach())
        loss = F.cross_entropy(logits.transpose(1, 2), ids)
        loss.backward()
        return loss.detach(), text

    results = []
    for function in (torch.compile(step, backend="streambp", options=OPTIONS), step):
        results.append([function(some_ids()), gradients(model)])
    assert_same(results[0], results[1])


@pytest.mark.parametrize("first", ["head.bias", "head.weight"])
def test_a_second_backward_pass_over_other_nodes_is_right(first: str) -> None:
    """The first has freed nothing that the second needs, so eager allows it."""
    parts = {"embed": nn.Embedding(30, 8), "head": nn.Linear(8, 30), "low": nn.Linear(8, 2), "high": nn.Linear(2, 30)}
    model = nn.ModuleDict(parts).double()
    ids, wanted = torch.randint(0, 30, (2, 12)), torch.randn(2, 12, 30, dtype=torch.float64)

    def logits(ids: Tensor) -> Tensor:
        x = model["embed"](ids).tanh()
        return model["head"](x) + model["high"](model["low"](x))  # type: ignore[no-any-return]

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = run(ids)
        earlier = torch.autograd.grad(found, [model.get_parameter(first)], wanted)
        return [
            *earlier,
            *torch.autograd.grad(found, [model.get_parameter(f"{name}.weight") for name in ("low", "high")], wanted),
        ]

    compiled = torch.compile(logits, backend="streambp", options={"outputs": "lazy", "bodies": "eager"})
    torch.testing.assert_close(gradients(compiled), gradients(logits), rtol=1e-12, atol=1e-12)
