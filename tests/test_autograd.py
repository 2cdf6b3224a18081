"""Promise one, for models that steer autograd themselves: checkpoints, functions with a backward of their own, detaching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import decoders, hf, layouts
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.twins import LENGTH, batch


@pytest.mark.parametrize("reentrant", only([True], [False, True]))
def test_checkpointing_in_the_model(reentrant: bool) -> None:
    class Checkpointed(decoders.Plain):
        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            for i in range(2):
                x = checkpoint(self.layer, x, i, use_reentrant=reentrant)  # type: ignore[assignment]
            return self.norms[-1](x)

        def layer(self, x: Tensor, i: int) -> Tensor:
            x = x + self.attend[i](self.norms[2 * i](x))
            return x + self.mlp[i](self.norms[2 * i + 1](x))

    compare(decoders.made(Checkpointed), batch(), also=(1, 16), attention={"causal"})


@pytest.mark.long
def test_checkpointing_of_a_huggingface_model() -> None:
    model = hf.made("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.train()
    compare(model, layouts.plain(layouts.tokens(hf.VOCABULARY, 2, LENGTH)), also=(1, 16), attention={"causal"})


def test_autograd_function() -> None:
    """A straight-through estimator: its own backward is the truth, not the derivative of its forward."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (4 * x).round() / 4

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * gradient

    class Quantised(decoders.Plain):
        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            return super().hidden(Rounded.apply(x))

    compare(decoders.made(Quantised), batch(), also=(1, 16), attention={"causal"})


def test_detached_branch() -> None:
    class Detached(decoders.Plain):
        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            return super().hidden(x) + super().hidden(x.detach() * 2)

    compare(decoders.made(lambda: Detached(1)), batch(), also=(1, 16), attention={"causal"})
