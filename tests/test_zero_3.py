"""DeepSpeed's ZeRO-3 is refused with the same message by all functions that compile a graph of its model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import enable
from streamfx.errors import IntegrationError

pytestmark = pytest.mark.compiled


class Layer(nn.Module):
    """A module of user code: `compile` of a module of torch's own compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


def compiled_in_place(model: nn.Module, x: Tensor) -> Any:
    """As DeepSpeed 0.19 does."""
    model.compile(backend="streambp")
    return model(x)


# functions, and the attribute that marks a parameter (`Init._convert_to_deepspeed_param`, DeepSpeed 0.19)
WAYS: dict[str, tuple[str, Callable[[nn.Module, Tensor], Any]]] = {
    "enable": ("ds_id", lambda model, x: enable(model)),
    "DeepSpeedEngine.compile": ("ds_status", compiled_in_place),
    "torch.compile": ("ds_shape", lambda model, x: torch.compile(lambda: model(x), backend="streambp")()),
    "explain": ("ds_id", lambda model, x: streamfx.explain(lambda: model(x))),
    "verify": ("ds_id", lambda model, x: streamfx.verify(model, x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_zero_3_is_refused(way: str) -> None:
    """Before anything runs: between calls a rank's weights are empty, and eager fails without the hooks."""
    model, (mark, call) = Layer(), WAYS[way]
    setattr(model.inner.weight, mark, 0)
    if way in ("explain", "verify"):
        model.inner.weight.data = torch.empty(0)
    with pytest.raises(IntegrationError, match=f"streambp cannot compile a model of DeepSpeed's ZeRO-3\n.* {mark}:") as caught:
        call(model, torch.ones(3, 2))
    assert "ZeRO-2" in str(caught.value) and "fully_shard" in str(caught.value)
    assert way != "enable" or model._compiled_call_impl is None


def test_zero_3_after_enable_is_refused() -> None:
    model = nn.Linear(2, 2)
    enable(model)
    model.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(IntegrationError, match="ZeRO-3"):
        model(torch.ones(1, 2))
