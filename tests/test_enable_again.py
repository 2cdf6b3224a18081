"""`enable` twice, `disable`, and options by name, as a dictionary and as an object: the same everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import streamfx
from streamfx import IntegrationError, OptionError, Options
from tests.support.small import Causal, tokens

IDS = tokens(2, 24)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(streamfx.options.ENVIRONMENT, raising=False)
    monkeypatch.setattr(streamfx.options, "_of_process", [])


class Trainer:
    """What `enable` asks of a trainer."""

    def __init__(self, model: nn.Module, ref_model: nn.Module | None = None) -> None:
        self.model, self.ref_model = model, ref_model


def test_twice_is_the_same_as_once() -> None:
    model = Causal()
    first = streamfx.enable(model, chunk_size=5)
    installed = model._compiled_call_impl
    assert streamfx.enable(model, chunk_size=5) is first
    assert streamfx.enable(Trainer(model), options={"chunk_size": 5}) is first
    assert streamfx.enable(model, options=Options(chunk_size=5)) is first
    assert model._compiled_call_impl is installed and first.is_enabled


def test_other_options_take_the_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    model = Causal().double()
    first = streamfx.enable(model, chunk_size=5)
    before = model(IDS, IDS)
    with caplog.at_level("WARNING", "streamfx"):
        second = streamfx.enable(model, chunk_size=7)
    assert "{'chunk_size': 7} take the place of {'chunk_size': 5}" in caplog.text
    assert second.is_enabled and not first.is_enabled
    assert torch.allclose(model(IDS, IDS), before, rtol=1e-12)
    assert second.calls["model"].counts.compiled == 1
    assert streamfx.enable(model, chunk_size=7, dynamic=True) is not second
    first.disable()  # it is off: nothing of what came after is undone
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize(
    "wrong", [{"chunk_size": 0}, {"chunksize": 7}, {"dynamic": "yes"}, {"options": {"save": "all"}}], ids=str
)
def test_what_is_refused_leaves_the_first_one_on(wrong: dict[str, Any]) -> None:
    model = Causal()
    first = streamfx.enable(model, chunk_size=5)
    installed = model._compiled_call_impl
    with pytest.raises(OptionError):
        streamfx.enable(model, **wrong)
    assert model._compiled_call_impl is installed and first.is_enabled and first.options == {"chunk_size": 5}


def test_a_part_of_what_is_enabled_is_refused() -> None:
    model, reference = Causal(), Causal()
    streamfx.enable(reference)
    with pytest.raises(IntegrationError, match="ref_model in place, and it is compiled already"):
        streamfx.enable(Trainer(model, reference))
    assert model._compiled_call_impl is None and reference._compiled_call_impl is not None


@pytest.mark.parametrize("by", ["the trainer", "its model", "its reference", "what enable returned"])
def test_disable_undoes_what_was_enabled_together(by: str) -> None:
    trainer = Trainer(Causal(), Causal())
    done = streamfx.enable(trainer)
    given = {"the trainer": trainer, "its model": trainer.model, "its reference": trainer.ref_model, "what enable returned": done}
    streamfx.disable(given[by])
    assert not done.is_enabled
    assert trainer.model._compiled_call_impl is None
    assert trainer.ref_model is not None and trainer.ref_model._compiled_call_impl is None
    streamfx.disable(given[by])


def test_disable_finds_what_is_inside_of_a_model_and_refuses_what_is_none() -> None:
    around = nn.Sequential(Causal())
    inner = streamfx.enable(around[0])
    streamfx.disable(around)
    assert not inner.is_enabled
    with pytest.raises(IntegrationError, match=r"a str without \.model"):
        streamfx.disable("model")


def test_an_object_stands_for_what_it_sets() -> None:
    with streamfx.configure(save="inputs"):
        assert streamfx.options.resolved(Options(chunk_size=5)) == Options(chunk_size=5, save="inputs")
    with streamfx.configure(options=Options(save="inputs"), chunk_size=5):
        assert streamfx.options.resolved() == Options(chunk_size=5, save="inputs")
    with pytest.raises(OptionError, match=r"'chunk_size' of streamfx.Options\(...\) cannot be 0"):
        Options(chunk_size=0)
    model = torch.compile(Causal(), backend="streambp", options=Options(chunk_size=5))  # type: ignore[call-overload]
    assert model(IDS, IDS) > 0


GIVEN: list[dict[str, Any]] = [
    {"options": {"chunk_size": 6, "save": "inputs"}},
    {"options": Options(chunk_size=6, save="inputs")},
    {"chunk_size": 6, "save": "inputs"},
    {"options": {"chunk_size": 6}, "save": "inputs"},
    {"options": Options(chunk_size=6), "chunk_size": 6, "save": "inputs"},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_options_are_taken_in_every_form(given: dict[str, Any]) -> None:
    asked = Options(chunk_size=6, save="inputs")
    assert streamfx.explain(Causal(), IDS, IDS, **given).call.options == asked
    assert streamfx.verify(Causal().double(), IDS, IDS, **given).ok
    assert Options(**streamfx.enable(Causal(), **given).options) == asked
    with streamfx.configure(**given):
        assert streamfx.options.resolved() == asked


FUNCTIONS = {
    "enable": lambda given: streamfx.enable(Causal(), **given),
    "explain": lambda given: streamfx.explain(Causal(), IDS, IDS, **given),
    "verify": lambda given: streamfx.verify(Causal(), IDS, IDS, **given),
    "plan": lambda given: streamfx.plan("Qwen3-8B", **given),
    "configure": lambda given: streamfx.configure(**given),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_contradiction_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=rf"streamfx\.{name}\(\.\.\.\) was given the option 'chunk_size' twice"):
        FUNCTIONS[name]({"options": Options(chunk_size=6), "chunk_size": 7})


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(OptionError, match=r"did you mean 'seq'"):
        streamfx.plan("Qwen3-8B", sec=64)
    with pytest.raises(OptionError, match="did you mean 'chunk_size'"):
        streamfx.plan("Qwen3-8B", chunksize=64)


class Saves(nn.Module):
    """A model whose forward has an argument called like an option."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Causal().double()

    def forward(self, ids: torch.Tensor, save: float = 1.0) -> torch.Tensor:
        return save * self.inner(ids, ids)


def test_an_argument_of_the_model_is_the_models() -> None:
    model = Saves()
    found = streamfx.verify(model, IDS, save=2.0, chunk_size=6)
    assert found.ok and found.loss == pytest.approx(2 * streamfx.verify(model, IDS).loss)
    assert streamfx.explain(Saves(), IDS, save=2.0, chunk_size=6).call.options == Options(chunk_size=6)
