"""Calls do not share state: several threads that call one compiled model get eager's results."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.frontend.gc_pause import pause_gc, resume_gc
from streamfx.lazy import steps
from tests.support import decoders
from tests.support.small import Padded
from tests.support.twins import batch

pytestmark = pytest.mark.compiled

THREADS = 4
CHUNKS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8}


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns after every few instructions, so that all of them touch shared state."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """What `work(number)` returns in each of several threads that begin at once; the first error is raised."""
    start = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda number: (start.wait(), work(number))[1], range(threads)))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="streambp", options=CHUNKS)


def assert_same(found: Any, truth: Any, what: str = "") -> None:
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def test_a_step_keeps_no_input_alive() -> None:
    """What it was given is gone with the step: nothing that is compiled holds it for another run to find."""
    weight = torch.randn(4, 4, requires_grad=True)
    call = torch.compile(lambda x: F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True).sum(), backend="streambp")
    x = torch.randn(1, 2, 20, 4)
    call(x).backward()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


class Steps:
    """A compiled model with a different padding mask in each thread, and eager's gradients for each."""

    def __init__(self) -> None:
        self.model = Padded(layers=2, width=8).double()
        self.call = compiled(lambda x, keep: self.model(x, keep).square().sum())
        self.x = torch.randn(2, 37, 8, dtype=torch.float64)
        self.keeps = [torch.arange(37).expand(2, -1) < 9 * (number + 1) for number in range(THREADS)]
        self.truth = [torch.autograd.grad(self.model(self.x, keep).square().sum(), self.model.w)[0] for keep in self.keeps]
        self.gradient(self.loss(0))

    def loss(self, number: int) -> Tensor:
        return self.call(self.x, self.keeps[number])

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.model.w)[0]


def test_backwards_may_run_in_other_threads() -> None:
    """All forward halves come first, in one thread; each backward half runs in a thread of its own, with a step inside."""
    steps = Steps()
    losses = [steps.loss(number) for number in range(THREADS)]

    def work(number: int) -> None:
        inner: list[Tensor] = []

        def between(gradient: Tensor) -> None:
            with torch.enable_grad():
                inner.append(steps.gradient(steps.loss(0)))

        losses[number].register_hook(between)
        assert_same([steps.gradient(losses[number]), *inner], [steps.truth[number], steps.truth[0]])

    together(work)


class Dropping(nn.Module):
    """Dropout and noise in a loop; the gradient of x is the mask that was drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.rand_like(x) * x, 0.4, True)


def test_dropout_in_several_threads_is_consistent() -> None:
    """A backward repeats the random numbers of its own forward, even if other threads draw meanwhile."""
    x, call = torch.ones(2, 37, 8, dtype=torch.float64), compiled(Dropping())

    def draws(number: int) -> None:
        for _ in range(6):
            own = x.clone().requires_grad_()
            out = call(own)
            torch.rand(3)
            assert_same(torch.autograd.grad(out.sum(), own)[0], out.detach(), "the gradient is not that of what was drawn")

    draws(0)
    together(draws)


def test_a_step_advances_the_generator_once() -> None:
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


def test_several_threads_may_read_a_deferred_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads read one output: in full, by rows, cast, and with its gradient in chunks."""
    monkeypatch.setattr(steps, "MIN_NUMEL", 1000)
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


# -- which calls stream


def test_a_call_streams_while_another_thread_compiles() -> None:
    """What says that something is compiled is one flag for the process: a call was taken for one that is traced."""
    model, inputs = decoders.made(decoders.Plain), batch(length=37)
    began, go_on = threading.Event(), threading.Event()

    def waiting(module: Any, given: Any) -> Any:
        began.set()
        go_on.wait(60)
        return module.forward

    with streamfx.enable(model, options=CHUNKS) as done:
        truth = model(**inputs).detach()
        other = threading.Thread(target=lambda: torch.compile(torch.sin, backend=waiting)(torch.ones(3)))
        other.start()
        assert began.wait(60)
        try:
            found = model(**inputs).detach()
        finally:
            go_on.set()
            other.join()
        counts = done.calls["model"].counts
    assert_same(found, truth)
    assert (counts.compiled, counts.plain) == (2, 0)


def test_tracers_see_the_original_model() -> None:
    """Export, and a larger function that is compiled: these see the model's own operators."""
    model, inputs = decoders.made(decoders.Plain), batch(length=37)
    with streamfx.enable(model, options=CHUNKS) as done:
        exported = torch.export.export(model, (), inputs, strict=False)
        torch.compile(lambda: model(**inputs) * 2, backend="eager")()
    counts = done.calls["model"].counts
    assert counts.compiled == 0 and not any("streamfx" in str(node.target) for node in exported.graph.nodes)


# -- the garbage collector is off while a step is traced


def test_collection_pauses_except_inside_a_search_and_resumes_after_the_last_pause() -> None:
    first, second = pause_gc(), pause_gc()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    with resume_gc():
        assert gc.isenabled()
        with pause_gc():
            assert not gc.isenabled()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    with pause_gc(), resume_gc():
        assert not gc.isenabled()
    gc.enable()


def test_objects_of_a_pause_are_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not young afterwards, when the collector would scan them again; garbage of the pause is freed."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # tests have frozen objects
    with pause_gc():
        kept, garbage = [[0]], nn.Identity()
        garbage.itself = garbage
        freed = weakref.ref(garbage)
        del garbage
    young = gc.get_objects(generation=0)
    gc.freeze()
    assert freed() is None and not any(item is kept for item in young)
