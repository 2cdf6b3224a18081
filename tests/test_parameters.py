"""Promise one, under what is done to parameters and buffers: freezing, adapting, tying, sharing, writing to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import decoders, hf, layouts
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.twins import LENGTH, batch, compiled, same_gradients, twins


def test_frozen_parameters() -> None:
    model = decoders.made(decoders.Plain)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name and "embed" not in name)
    report = compare(model, batch(), attention={"causal"}, also=(1, 16))
    assert report.errors


def test_only_low_rank_adapters_are_trained() -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.down, self.up = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.up(self.down(x)) * 0.5

    model = decoders.made(decoders.Plain).requires_grad_(False)
    for attend in model.attend:  # type: ignore[union-attr]
        attend.q, attend.v = Adapted(attend.q).double(), Adapted(attend.v).double()  # type: ignore[union-attr]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    compare(model, batch(), attention={"causal"}, also=(1, 16))


def test_tied_weights() -> None:
    class Tied(decoders.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight

    compare(decoders.made(Tied), batch(), attention={"causal"}, also=(1, 16))


def test_a_layer_used_twice() -> None:
    class Shared(decoders.Plain):
        def __init__(self) -> None:
            super().__init__(2)
            self.attend[1], self.mlp[1] = self.attend[0], self.mlp[0]

    compare(decoders.made(Shared), batch(), attention={"causal"}, also=(1, 16))


def test_an_unused_parameter_keeps_no_gradient() -> None:
    class Spare(decoders.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))

    compare(decoders.made(Spare), batch(), attention={"causal"})


def test_requires_grad_toggled_between_steps() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for trained in (True, False, True):
        for model in (own, eager):
            model.zero_grad(set_to_none=True)
            model.mlp.requires_grad_(trained)  # type: ignore[operator,union-attr]
        function(**batch()).backward()
        eager(**batch()).backward()
        same_gradients(own, eager, f"trained: {trained}")


@pytest.mark.parametrize("attention", only(["eager"], ["sdpa", "eager"]))
def test_gradients_of_inputs_embeds(attention: str) -> None:
    ids = layouts.tokens(hf.VOCABULARY, 2, LENGTH)
    embeds = torch.randn(2, LENGTH, hf.WIDTH, dtype=torch.float64, requires_grad=True)
    found = {"sdpa": "causal", "eager": "masked"}[attention]  # what a caller hands in may be large beside a finite fill
    compare(hf.made("llama", attention), {"inputs_embeds": embeds, "labels": ids}, also=(1, 16), attention={found})


# -- buffers


def test_a_buffer_that_is_updated() -> None:
    """A running statistic is written in the forward pass: exact, streamed or not."""

    class Counting(decoders.Plain):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(decoders.WIDTH))

        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            out = super().hidden(x, **more)
            self.seen.add_(out.detach().mean((0, 1)))
            return out

    own, eager = twins(Counting)
    function, _ = compiled(own)
    for seed in range(2):
        function(**batch(seed=seed)).backward()
        eager(**batch(seed=seed)).backward()
    same_gradients(own, eager)
    torch.testing.assert_close(own.seen, eager.seen, rtol=1e-12, atol=1e-14)


def test_a_mask_buffer_that_is_written_to_after_compiling() -> None:
    """The compiled graph relies on the mask that it found; a change must not be overlooked."""
    own, eager = twins(decoders.TrilBuffer)
    function, _ = compiled(own)
    for mask in (None, torch.ones(48, 48).tril(2), torch.ones(48, 48), torch.ones(48, 48).tril()):
        for model in (own, eager):
            model.zero_grad()
            for attend in model.attend:  # type: ignore[union-attr]
                if mask is not None:
                    attend.tril.copy_(mask)  # type: ignore[union-attr,operator]
        function(**batch()).backward()
        eager(**batch()).backward()
        same_gradients(own, eager)
