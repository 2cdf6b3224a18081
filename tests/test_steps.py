"""Promise one, over several steps that are compiled once: training, evaluating in between, updating in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import decoders
from tests.support.exactness import check_streamed
from tests.support.twins import batch, compiled, twins


def test_training_steps() -> None:
    """Parameters change in place between steps."""
    own, eager = twins()
    function, backend = compiled(own)
    for run, model in ((function, own), (eager, eager)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            optimizer.zero_grad()
            run(**batch(seed=seed)).backward()
            optimizer.step()
    assert len(backend.compilations) == 1
    for (name, one), (_, other) in zip(own.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.long)])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    own, eager = twins()
    function, backend = compiled(own)
    with mode():
        torch.testing.assert_close(function(**batch()), eager(**batch()), rtol=1e-12, atol=0)
    check_streamed(backend.facts, True, {"causal"})


def test_backward_twice_is_refused() -> None:
    function, _ = compiled(decoders.made(decoders.Plain))
    loss = function(**batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
