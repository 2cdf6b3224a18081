"""Promise one, over several steps: accumulating, evaluating in between, backwards in any order, once or twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import decoders
from tests.support.exactness import check_streamed
from tests.support.twins import batch, compiled, same_gradients, twins


def test_gradient_accumulation() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    for seed in range(3):
        function(**batch(seed=seed)).backward()
        eager(**batch(seed=seed)).backward()
    same_gradients(own, eager)
    assert len(backend.compilations) == 1


def test_two_calls_before_one_backward() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    (function(**batch(seed=1)) * function(**batch(seed=2))).backward()
    (eager(**batch(seed=1)) * eager(**batch(seed=2))).backward()
    same_gradients(own, eager)
    assert len(backend.compilations) == 1


def test_backwards_in_the_other_order() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for run, model in ((function, own), (eager, eager)):
        first, second = run(**batch(seed=1)), run(**batch(seed=2))
        (2 * second).backward()
        (3 * first).backward()
        assert model.embed.weight.grad is not None  # type: ignore[union-attr]
    same_gradients(own, eager)


def test_training_steps() -> None:
    """Parameters change in place between steps."""
    own, eager = twins()
    function, backend = compiled(own)
    for run, model in ((function, own), (eager, eager)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(4):
            optimizer.zero_grad()
            run(**batch(seed=seed)).backward()
            optimizer.step()
    assert len(backend.compilations) == 1
    for (name, one), (_, other) in zip(own.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    own, eager = twins()
    function, backend = compiled(own)
    with mode():
        torch.testing.assert_close(function(**batch()), eager(**batch()), rtol=1e-12, atol=0)
    check_streamed(backend.facts, True, {"causal"})


def test_evaluation_between_training_steps() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    function(**batch()).backward()
    own.eval()
    with torch.no_grad():
        evaluated = function(**batch(seed=4))
    own.train()
    function(**batch(seed=1)).backward()
    for seed in (0, 1):
        eager(**batch(seed=seed)).backward()
    same_gradients(own, eager)
    torch.testing.assert_close(evaluated, eager(**batch(seed=4)), rtol=1e-12, atol=0)


def test_retain_graph() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for run in (function, eager):
        loss = run(**batch())
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(own, eager)


def test_backward_twice_is_refused() -> None:
    function, _ = compiled(decoders.made(decoders.Plain))
    loss = function(**batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_says_that_it_is_not_supported() -> None:
    model = decoders.made(decoders.Plain)
    function, _ = compiled(model)
    loss = function(**batch())
    (gradient,) = torch.autograd.grad(loss, [model.get_parameter("embed.weight")], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.pow(2).sum().backward()


def test_a_gradient_of_some_inputs_only() -> None:
    """torch.autograd.grad for one parameter."""
    own, eager = twins()
    function, _ = compiled(own)
    (actual,) = torch.autograd.grad(function(**batch()), [own.get_parameter("head.weight")])
    (truth,) = torch.autograd.grad(eager(**batch()), [eager.get_parameter("head.weight")])
    torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-15)
