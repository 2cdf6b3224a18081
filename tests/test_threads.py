"""Calls do not share state: several threads that call one compiled model get what eager gives each of them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.lazy import steps
from tests.support import decoders
from tests.support.small import Padded
from tests.support.twins import batch

THREADS, CHUNKS = 4, {"chunk_size": 8, "loss_chunk_size": 8}
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns after every few instructions, so that what they share is touched by all of them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """What `work(number)` returns in each of several threads that begin at once; the first error is raised."""
    start, results, failed = threading.Barrier(threads), [None] * threads, list[BaseException]()

    def run(number: int) -> None:
        try:
            start.wait()
            results[number] = work(number)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for act in (threading.Thread.start, threading.Thread.join):
        for worker in workers:
            act(worker)
    if failed:
        raise failed[0]
    return results


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="streambp", options={**CHUNKS, **options})


def stepped(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """A loss and the gradients of all parameters, in tensors of their own."""
    loss = call(**inputs)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def assert_same(found: Any, truth: Any, what: str = "") -> None:
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def test_a_run_keeps_nothing() -> None:
    """What it was given is gone with the step: nothing that is compiled holds it for another run to find."""
    weight = torch.randn(4, 4, requires_grad=True)
    call = torch.compile(lambda x: F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True).sum(), backend="streambp")
    x = torch.randn(1, 2, 20, 4)
    call(x).backward()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


class PaddedLoss(Padded):
    """The sum of squares of layers under a padding mask."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(x, keep).square().sum()


def padded() -> tuple[PaddedLoss, list[Inputs]]:
    """What one thread has found of its mask is not what another one sees, and is not forgotten for it."""
    x = torch.randn(2, 37, 8, dtype=torch.float64)
    keeps = [torch.arange(37).expand(2, -1) < 9 * (number + 1) for number in range(THREADS)]
    return PaddedLoss(layers=2, width=8).double(), [{"x": x, "keep": keep} for keep in keeps]


def test_steps_of_several_threads() -> None:
    """Some of them without gradients."""
    model, inputs = padded()
    call = compiled(model)
    truth = [stepped(model, model, item) for item in inputs]
    stepped(model, call, inputs[0])
    with torch.no_grad():
        call(**inputs[0])

    def work(number: int) -> list[Any]:
        if number != 3:
            return [stepped(model, call, inputs[number]) for _ in range(6)]
        with torch.no_grad():
            return [[call(**inputs[number])] for _ in range(6)]

    for number, found in enumerate(together(work)):
        for one in found:
            assert_same(one, truth[number][: len(one)])


class Dropping(nn.Module):
    """Dropout and noise in a loop; the gradient of x is the mask that was drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.rand_like(x) * x, 0.4, True)


def test_draws_of_several_threads() -> None:
    """A backward half draws what its own forward half has drawn, whoever draws meanwhile; nobody's generator is set."""
    x, call = torch.ones(2, 37, 8, dtype=torch.float64), compiled(Dropping())
    call(x.clone().requires_grad_()).sum().backward()

    def draws(number: int) -> None:
        for _ in range(6):
            own = x.clone().requires_grad_()
            out = call(own)
            torch.rand(3)
            (gradient,) = torch.autograd.grad(out.sum(), own)
            assert_same(gradient, out.detach(), "the gradient is not that of what was drawn")

    together(draws)


def test_draws_leave_the_generator_alone() -> None:
    """A step takes one number from the process's generator, however many chunks draw; others may draw at the same time."""
    call = compiled(Dropping())

    def after(chunked: Callable[[], Any]) -> Tensor:
        torch.manual_seed(3)
        chunked()
        return torch.rand(4)

    def step() -> None:
        x = torch.ones(1, 40, 4, requires_grad=True)
        call(x).sum().backward()

    step()
    assert torch.equal(after(step), after(lambda: torch.randint(0, 2**62, ())))
    with torch.random.fork_rng(devices=[]):
        step()
    assert torch.equal(after(lambda: None), after(lambda: None))


def test_deferred_outputs_that_several_threads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output is read in all threads at once: whole, by rows, cast, with its gradient, which is made in chunks."""
    monkeypatch.setattr(steps, "LEAST", 1000)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 300, bias=False)).double()
    x, call = torch.randn(2, 37, 8, dtype=torch.float64), compiled(model)
    truth = model(x)
    wanted = torch.autograd.grad(truth.square().sum(), list(model.parameters()))
    for _ in range(6):
        logits = call(x)
        assert type(logits) is not Tensor

        def read(number: int, logits: Tensor = logits) -> None:
            if number % 2:
                assert_same(logits[:, 3 * number], truth[:, 3 * number], "a row")
                assert_same(logits[:, -5:].float(), truth[:, -5:].float(), "some rows, cast")
            loss = logits.square().sum()
            assert_same(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True), wanted, "gradients")
            assert_same(logits.detach().clone(), truth.detach(), "all")

        together(read)


# -- halves that cross


def test_a_backward_half_in_another_thread_than_its_forward_half() -> None:
    """All forward halves come first, in one thread; each backward half runs in a thread of its own."""
    model, inputs = padded()
    call, (weight,) = compiled(model), model.parameters()
    truth = [torch.autograd.grad(model(**item), weight)[0] for item in inputs]
    losses = [call(**item) for item in inputs]
    assert_same(together(lambda number: torch.autograd.grad(losses[number], weight)[0]), truth)


def test_a_step_inside_of_a_backward_half() -> None:
    """A hook runs a step of the same compiled model while its backward half runs; then the outer one goes on."""
    (model, inputs), inner = padded(), list[Any]()
    call, (weight,) = compiled(model), model.parameters()
    truth = [torch.autograd.grad(model(**item), weight) for item in inputs]

    def between(gradient: Tensor) -> None:
        with torch.enable_grad():
            inner.append(torch.autograd.grad(call(**inputs[1]), weight))

    loss = call(**inputs[0])
    loss.register_hook(between)
    pending = call(**inputs[1])
    assert_same(torch.autograd.grad(loss, weight), truth[0], "the outer one")
    assert_same(inner, [truth[1]], "the inner one")
    assert_same(torch.autograd.grad(pending, weight), truth[1], "one that waited")


# -- what is counted


def test_a_call_streams_while_another_thread_compiles() -> None:
    """What says that something is compiled is one flag for the process: a call was taken for one that is traced."""
    model, inputs = decoders.made(decoders.Plain), batch(length=37)
    began, go_on = threading.Event(), threading.Event()

    def waiting(module: Any, given: Any) -> Any:
        began.set()
        go_on.wait(60)
        return module.forward

    with streamfx.enable(model, options=CHUNKS) as done:
        truth = stepped(model, model, inputs)
        other = threading.Thread(target=lambda: torch.compile(torch.sin, backend=waiting)(torch.ones(3)))
        other.start()
        assert began.wait(60)
        try:
            found = stepped(model, model, inputs)
        finally:
            go_on.set()
            other.join()
        counts = done.calls["model"].counts
    assert_same(found, truth)
    assert (counts.compiled, counts.plain) == (2, 0)


def test_what_traces_a_call_traces_the_model_as_it_was() -> None:
    """Export, and a larger function that is compiled: these see the model's own operators."""
    model, inputs = decoders.made(decoders.Plain), batch(length=37)
    with streamfx.enable(model, options=CHUNKS) as done:
        exported = torch.export.export(model, (), inputs, strict=False)
        torch.compile(lambda: model(**inputs) * 2, backend="eager")()
    counts = done.calls["model"].counts
    assert counts.compiled == 0 and not any("streamfx" in str(node.target) for node in exported.graph.nodes)
