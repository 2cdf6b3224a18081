"""Promise one, over steps, and under what is done to parameters, buffers and autograd: tying, adapters, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import decoders, hf, layouts
from tests.support.exactness import check_streamed, compare
from tests.support.twins import LENGTH, batch, compiled, same_step, twins

pytestmark = pytest.mark.compiled


class Checkpointed(decoders.Plain):
    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        for i in range(2):
            x = checkpoint(self.layer, x, i, use_reentrant=True)  # type: ignore[assignment]
        return self.norms[-1](x)

    def layer(self, x: Tensor, i: int) -> Tensor:
        x = x + self.attend[i](self.norms[2 * i](x))
        return x + self.mlp[i](self.norms[2 * i + 1](x))


class Rounded(torch.autograd.Function):
    """A straight-through estimator: its own backward is the truth, not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Quantised(decoders.Plain):
    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        return super().hidden(Rounded.apply(x))


class LowRank(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x)) * 0.5


def adapted() -> nn.Module:
    model = decoders.Plain().requires_grad_(False)
    for attend in model.attend:
        attend.q, attend.v = LowRank(attend.q), LowRank(attend.v)  # type: ignore[arg-type]
    return model


def tied() -> nn.Module:
    model = decoders.Plain()
    model.head.weight = model.embed.weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reentrant checkpoints": Checkpointed,
    "a backward of its own": Quantised,
    "adapters alone are trained": adapted,
    "tied weights": tied,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager(name: str) -> None:
    compare(decoders.made(MODELS[name]), batch(), also=(1, 16), attention={"causal"})


@pytest.mark.long
def test_checkpointing_of_a_huggingface_model() -> None:
    model = hf.made("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.train()
    compare(model, layouts.plain(layouts.tokens(hf.VOCABULARY, 2, LENGTH)), also=(1, 16), attention={"causal"})


def test_a_mask_buffer_that_is_written_to_after_compiling() -> None:
    """The compiled graph relies on the mask that it found; a change must not be overlooked, nor what is trained."""
    own, eager = twins(decoders.TrilBuffer)
    function, _ = compiled(own)
    for trained, mask in enumerate(
        (torch.ones(48, 48).tril(), torch.ones(48, 48).tril(2), torch.ones(48, 48), torch.ones(48, 48).tril())
    ):
        for model in (own, eager):
            model.mlp.requires_grad_(trained != 2)  # type: ignore[operator,union-attr]
            for attend in model.attend:  # type: ignore[union-attr]
                attend.tril.copy_(mask)  # type: ignore[union-attr,operator]
        same_step(function, own, eager, batch())


# -- over several steps that are compiled once


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
