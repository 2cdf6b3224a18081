"""Calls do not share state: several threads that call one compiled model get what eager gives each of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import decoders
from tests.support.small import Padded
from tests.support.twins import batch

THREADS, CHUNKS = 4, {"chunk_size": 8, "loss_chunk_size": 8}
REPEATS = pytest.mark.parametrize("repeats", [6, pytest.param(60, marks=pytest.mark.long)])


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
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            failed.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return results


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="streambp", options={**CHUNKS, **options})


def stepped(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor]) -> list[Tensor]:
    """A loss and the gradients of all parameters, in tensors of their own."""
    loss = call(**inputs)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def assert_same(found: Any, truth: Any, what: str = "") -> None:
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


@REPEATS
@pytest.mark.parametrize("first", ["compiled before", "compiled by all"])
def test_training_steps_of_several_threads(first: str, repeats: int) -> None:
    model = decoders.made(decoders.Plain)
    call, inputs = compiled(model), [batch(length=37, seed=seed) for seed in range(THREADS)]
    truth = [stepped(model, model, item) for item in inputs]
    if first == "compiled before":
        stepped(model, call, inputs[0])
    for found in zip(*together(lambda number: [stepped(model, call, inputs[number]) for _ in range(repeats)]), strict=True):
        assert_same(list(found), truth)


class PaddedLoss(Padded):
    """The sum of squares of layers under a padding mask."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(x, keep).square().sum()


@REPEATS
def test_masks_of_several_threads(repeats: int) -> None:
    """What one thread has found of its mask is not what another one sees, and is not forgotten for it."""
    model = PaddedLoss(layers=3, width=8).double()
    x = torch.randn(2, 37, 8, dtype=torch.float64)
    inputs = [{"x": x, "keep": torch.arange(37).expand(2, -1) < 9 * (number + 1)} for number in range(THREADS)]
    truth, call = [stepped(model, model, item) for item in inputs], compiled(model)
    stepped(model, call, inputs[0])
    for found in zip(*together(lambda number: [stepped(model, call, inputs[number]) for _ in range(repeats)]), strict=True):
        assert_same(list(found), truth)


class Dropping(nn.Module):
    """Dropout and noise in a loop; the gradient of x is the mask that was drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.rand_like(x) * x, 0.4, True)


@REPEATS
def test_draws_of_several_threads(repeats: int) -> None:
    """A backward half draws what its own forward half has drawn, whoever draws meanwhile; nobody's generator is set."""
    x, call = torch.ones(2, 37, 8, dtype=torch.float64), compiled(Dropping())
    call(x.clone().requires_grad_()).sum().backward()

    def draws(number: int) -> None:
        for _ in range(repeats):
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


@REPEATS
def test_passes_without_gradients_beside_training(repeats: int) -> None:
    model = decoders.made(decoders.Plain)
    call, inputs = compiled(model), [batch(length=37, seed=seed) for seed in range(THREADS)]
    truth = [stepped(model, model, item) for item in inputs]

    def work(number: int) -> list[Any]:
        if number % 2:
            return [stepped(model, call, inputs[number]) for _ in range(repeats)]
        with torch.no_grad():
            return [[call(**inputs[number])] for _ in range(repeats)]

    for number, found in enumerate(together(work)):
        for one in found:
            assert_same(one, truth[number][: len(one)])
