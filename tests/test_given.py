"""What is given to explain and verify: a single row, and models that are compiled already, however."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.frontend.backend import streambp
from tests.support.small import Causal, tokens
from tests.test_explain import summary_of


def test_a_single_row_is_named_as_what_it_is() -> None:
    """No larger part of the model would help."""
    (stage,) = summary_of(Causal(), tokens(1, 1), tokens(1, 1))["stages"]
    assert "the inputs are a single row" in stage["reason"] and "give sequences of more rows" in stage["reason"]
    (stage,) = summary_of(lambda x: x.softmax(-1) * 2, torch.randn(1, 4, requires_grad=True))["stages"]
    assert "the inputs are a single row" in stage["reason"]
    (stage,) = summary_of(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True))["stages"]
    assert "single row" not in stage["reason"]


class Two(nn.Module):
    """Layers of one class, with parameters of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def compiled(model: Any, options: Any = None, **keywords: Any) -> Any:
    return torch.compile(model, backend="streambp", options=options or {"chunk_size": 24}, **keywords)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="streambp", options={"chunk_size": 24})
    return model


def enabled(model: nn.Module) -> nn.Module:
    streamfx.enable(model, chunk_size=24)
    return model


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": compiled,
    "all in one graph": lambda model: compiled(model, fullgraph=True),
    "twice": lambda model: compiled(torch.compile(model, backend="streambp", options={"chunk_size": 8})),
    "thrice": lambda model: compiled(compiled(compiled(model))),
    "a function": lambda model: compiled(lambda x: model(x)),
    "with an object": lambda model: compiled(model, streamfx.Options(chunk_size=24)),
    "by the function": lambda model: torch.compile(model, backend=functools.partial(streambp, options={"chunk_size": 24})),
    "in place": in_place,
    "enabled": enabled,
    "inside of a function": lambda model: functools.partial(lambda made, x: made(x), compiled(model)),
    "inside of a module": lambda model: nn.Sequential(in_place(model)),
}


@pytest.mark.parametrize("how", COMPILED)
def test_what_was_compiled_is_looked_at_with_its_options_and_its_names(how: str) -> None:
    x = torch.randn(2, 48, 8)
    model = COMPILED[how](Two())
    found = streamfx.explain(model, x)
    assert found.call.options.chunk_size == 24 and 24 in {stage.chunk_size for stage in found.stages}
    assert streamfx.explain(model, x, chunk_size=16).call.options.chunk_size == 16
    verified = streamfx.verify(model, x)
    around = "0." if how == "inside of a module" else ""
    assert set(verified.errors) == {f"{around}{name}" for name, _ in Two().named_parameters()}


@pytest.mark.parametrize("made", [lambda model: torch.compile(model, backend="eager"), lambda model: model])
def test_other_backends_have_no_options_of_ours(made: Callable[[Any], Any]) -> None:
    assert streamfx.explain(made(Two()), torch.randn(2, 48, 8)).call.options.chunk_size == "auto"


def test_a_layer_of_torchs_own_that_is_compiled_twice() -> None:
    twice = compiled(compiled(nn.Linear(8, 8)))
    assert set(streamfx.verify(twice, torch.randn(2, 48, 8)).errors) == {"weight", "bias"}


def test_parameters_of_the_same_name_are_all_compared() -> None:
    """Of modules that a function names, which are of one class."""
    first, second, third = (nn.Linear(8, 8) for _ in range(3))
    found = streamfx.verify(lambda x: third(second(first(x).tanh()).tanh()).square().mean(), torch.randn(2, 48, 8))
    assert len(found.errors) == 6 and all(found.norms.values())
    assert {"Linear.weight", "Linear(2).weight", "Linear(3).bias"} < set(found.errors)


def test_a_method_that_is_compiled_in_its_class_stays_one() -> None:
    """It has the attributes of the function, and an object beside it."""

    class Method(Two):
        forward = torch.compile(Two.forward, backend="streambp", options={"chunk_size": 24})

    found = streamfx.explain(Method().forward, torch.randn(2, 48, 8))
    assert found.summary()["flops"] > 0 and found.call.options.chunk_size == 24
