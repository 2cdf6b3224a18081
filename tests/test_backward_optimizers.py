"""An optimizer in the backward pass: updates are those of one behind it, and gradients of two stages are alive at most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from streamfx.cost.meter import Meter
from tests.support.spread import only
from tests.support.stages import Layers, Staged, batch, descend, hooked


def trained(staged: Staged, steps: int = 3) -> dict[str, Tensor]:
    for seed in range(steps):
        staged(*batch(seed)).backward()
    return {name: parameter.detach().clone() for name, parameter in staged.model.named_parameters()}


def trained_afterwards(staged: Staged, steps: int = 3) -> dict[str, Tensor]:
    """The same, the optimizer running behind the backward pass."""
    staged.reset()
    staged.chain.always = False
    for seed in range(steps):
        staged(*batch(seed)).backward()
        for parameter in staged.model.parameters():
            descend(parameter)
    return {name: parameter.detach().clone() for name, parameter in staged.model.named_parameters()}


class Peeks(Layers):
    """The first layer reads a weight of the last one, of which it makes no gradient: it must not be updated before."""

    def first(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        return nn.functional.linear(x, self.get_parameter("out.1.weight").detach()).sin()


MODELS = {"plain": Layers, "tied": lambda: Layers(tied=True), "peeks": Peeks, "three": lambda: Layers(3)}


@pytest.mark.parametrize("name", only(["peeks", "tied"], MODELS))
def test_updates_are_those_of_an_optimizer_behind_the_backward_pass(name: str) -> None:
    staged = Staged(MODELS[name](), *batch())
    with hooked(list(staged.model.parameters()), descend):
        found = trained(staged)
    truth = trained_afterwards(staged)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_gradients_of_two_stages_are_alive() -> None:
    """Of four layers; the optimizer in the backward pass frees each gradient, and so does adding it to one that is there."""
    staged = Staged(Layers(4, width=32), *batch())
    size = {name: parameter.numel() * 8 for name, parameter in staged.model.named_parameters()}
    layer = sum(of for name, of in size.items() if ".0." in name)

    def peak(stagewise: bool) -> int:
        staged.chain.always = stagewise
        loss = staged(*batch(1))
        with Meter() as meter:
            loss.backward()
        return meter.peak

    all_alive = peak(False)
    besides = all_alive - sum(size.values())
    assert peak(True) - besides <= 2 * layer, "added to gradients that are there"
    staged.model.zero_grad()
    with hooked(list(staged.model.parameters()), descend):
        assert peak(True) - besides <= 2 * layer
    assert all_alive - besides >= 4 * layer
