"""DeepSpeed's ZeRO-3 is refused, in the same words, wherever a graph of its model would be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import enable
from streamfx.errors import IntegrationError

pytestmark = pytest.mark.compiled


def compiled_in_place(model: nn.Module, x: Tensor) -> Any:
    """As DeepSpeed 0.19 does it."""
    model.compile(backend="streambp")
    return model(x)


MARKS = ("ds_id", "ds_status", "ds_shape")  # of DeepSpeed's `Init._convert_to_deepspeed_param` (0.19), on each parameter
WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "enable": lambda model, x: enable(model),
    "DeepSpeedEngine.compile": compiled_in_place,
    "torch.compile": lambda model, x: torch.compile(lambda: model(x), backend="streambp")(),
    "explain": lambda model, x: streamfx.explain(lambda: model(x)),
    "verify": lambda model, x: streamfx.verify(model, x),
}
BEFORE = [(way, "ds_id", True) for way in ("explain", "verify")]


class Layer(nn.Module):
    """A module of one's own: `compile` of torch's own compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


@pytest.mark.parametrize(
    ("way", "mark", "empty"), [*((way, mark, False) for way, mark in zip(WAYS, MARKS * 2, strict=False)), *BEFORE]
)
def test_zero_3_is_refused(way: str, mark: str, empty: bool) -> None:
    """Before anything runs: between calls a rank's weights are empty, and eager fails without the hooks."""
    model = Layer()
    setattr(model.inner.weight, mark, 0)
    if empty:
        model.inner.weight.data = torch.empty(0)
    with pytest.raises(IntegrationError, match=f"streambp cannot compile a model of DeepSpeed's ZeRO-3\n.* {mark}:") as caught:
        WAYS[way](model, torch.ones(3, 2))
    assert "ZeRO-2" in str(caught.value) and "fully_shard" in str(caught.value)
    assert way != "enable" or model._compiled_call_impl is None


def test_zero_3_is_refused_where_it_comes_after_enable() -> None:
    model = nn.Linear(2, 2)
    enable(model)
    model.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(IntegrationError, match="ZeRO-3"):
        model(torch.ones(1, 2))
