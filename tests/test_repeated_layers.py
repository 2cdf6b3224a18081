"""What eager takes of many layers, from few of them: the same as of all, and all are run where few do not stand for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamfx.cost.memory import Cost
from streamfx.cost.repeats import Repeat
from streamfx.tools.inspect.eager import EagerCall, accepting_real, checkpointed, faker_of
from streamfx.tools.inspect.layers import layers_of, repeat_of


class Layer(nn.Module):
    def __init__(self, inner: int, number: int, special: int | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, inner, device="meta"), nn.Linear(inner, 16, device="meta")
        self.number, self.special = number, special

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x).relu()
        return x + self.down(inner.sigmoid() if self.number == self.special else inner)


class Stack(nn.Module):
    """Layers with `inners` inner values, of which the one with the number `special` does more; `twice` are called again."""

    def __init__(self, inners: list[int], special: int | None = None, twice: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(inner, number, special) for number, inner in enumerate(inners))
        self.head, self.twice = nn.Linear(16, 50, device="meta"), twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *(self.layers if self.twice else ())]:
            x = layer(x)
        return self.head(x).logsumexp(-1).sum()


Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def costs_of(model: nn.Module, around: Around | None) -> tuple[bool, Cost | None, Cost | None]:
    """Whether few layers stand for all, what the step costs, and what it costs with all of them run."""
    inputs: Mapping[str, Any] = {"x": torch.empty(2, 64, 16, device="meta")}
    mode, faker = faker_of(model, (), inputs)
    with accepting_real(mode), mode:
        found, whole = EagerCall(model, (), inputs, faker), EagerCall(model, (), inputs, faker)
        whole.__dict__["alike"] = None
        return found.alike is not None, found.cost(around), whole.cost(around)


def frozen(model: Stack) -> Stack:
    for layer in model.layers:
        layer.up.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize("around", [None, checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "model",
    [
        Stack([32] * 12),
        Stack([64] * 2 + [32] * 13),
        Stack([32, 64] * 8),
        Stack([32, 64] * 8 + [32]),
        frozen(Stack([32] * 12)),
    ],
    ids=["alike", "others first", "in turn", "in turn, odd", "frozen weights"],
)
def test_few_layers_that_stand_for_all_cost_what_all_cost(model: Stack, around: Around | None) -> None:
    stand, found, whole = costs_of(model, around)
    assert stand and found is not None and whole is not None
    assert found == whole and found.gradients > 0
    assert found.forward_curve == whole.forward_curve and found.backward_curve == whole.backward_curve


@pytest.mark.parametrize(
    "model",
    [Stack([32] * 12, special=7), Stack([32] * 12, twice=True), Stack([32] * 5), Stack([16 * i for i in range(1, 13)])],
    ids=["one does more", "called twice", "too few", "none alike"],
)
def test_layers_that_few_do_not_stand_for_are_all_run(model: Stack) -> None:
    stand, found, whole = costs_of(model, None)
    assert not stand and found is not None and found == whole


def test_layers_one_after_the_other_are_layers_too() -> None:
    """What is put together of plain operators is none."""
    layers = [Layer(32, number) for number in range(12)]
    assert layers_of(nn.Sequential(nn.Linear(16, 16), nn.Sequential(*layers), nn.LayerNorm(16))) == layers
    assert layers_of(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))) == []


def test_a_layer_that_shares_a_weight_or_has_a_hook_is_like_no_other() -> None:
    shared, hooked = Stack([32] * 12), Stack([32] * 12)
    shared.layers[7].up = shared.layers[3].up
    hooked.layers[7].register_forward_hook(lambda module, given, out: out + 1)
    assert repeat_of(Stack([32] * 12)) == Repeat(1, 1, 4, 12)
    assert repeat_of(shared) is None
    assert repeat_of(hooked) is None


@pytest.mark.parametrize("by_settings", [False, True])
def test_no_layers_stand_for_none(by_settings: bool) -> None:
    assert repeat_of(Stack([]), by_settings) is None
