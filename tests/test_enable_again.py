"""`enable` twice, `disable`, and options by name, as a dictionary and as an object: the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
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

    def __init__(self, model: Any, ref_model: Any = None) -> None:
        self.model, self.ref_model = model, ref_model


def test_twice_is_the_same_as_once() -> None:
    model = Causal()
    first = streamfx.enable(model, chunk_size=5)
    installed = model._compiled_call_impl
    assert streamfx.enable(Trainer(model), options={"chunk_size": 5}) is first
    assert streamfx.enable(model, options=Options(chunk_size=5)) is first
    for wrong in ({"chunk_size": 0}, {"chunksize": 7}, {"dynamic": "yes"}):
        with pytest.raises(OptionError):
            streamfx.enable(model, **wrong)
    assert model._compiled_call_impl is installed and first.is_enabled and first.options == {"chunk_size": 5}


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


def test_a_refused_trainer_is_not_half_enabled() -> None:
    trainer = Trainer(Causal(), Causal())
    with (
        streamfx.enable(trainer.ref_model),
        pytest.raises(IntegrationError, match="ref_model in place, and it is compiled already"),
    ):
        streamfx.enable(trainer)
    trainer.ref_model = torch.compile(trainer.ref_model)
    with pytest.raises(IntegrationError, match="compiled already"):
        streamfx.enable(trainer)
    assert trainer.model._compiled_call_impl is None


GIVEN_TO_DISABLE: dict[str, Callable[[Trainer, Any], Any]] = {
    "the trainer": lambda trainer, done: trainer,
    "its model": lambda trainer, done: trainer.model,
    "what is around its reference": lambda trainer, done: nn.Sequential(trainer.ref_model),
    "what enable returned": lambda trainer, done: done,
}


@pytest.mark.parametrize("by", GIVEN_TO_DISABLE)
def test_disable_undoes_what_was_enabled_together(by: str) -> None:
    trainer = Trainer(Causal(), Causal())
    done = streamfx.enable(trainer)
    for _ in range(2):
        streamfx.disable(GIVEN_TO_DISABLE[by](trainer, done))
        assert not done.is_enabled
        assert trainer.model._compiled_call_impl is None and trainer.ref_model._compiled_call_impl is None


GIVEN: list[dict[str, Any]] = [
    {"options": {"chunk_size": 6, "save": "inputs"}},
    {"chunk_size": 6, "save": "inputs"},
    {"options": Options(chunk_size=6), "chunk_size": 6, "save": "inputs"},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_options_are_taken_in_every_form(given: dict[str, Any]) -> None:
    asked = Options(chunk_size=6, save="inputs")
    assert streamfx.explain(Causal(), IDS, IDS, **given).call.options == asked
    assert Options(**streamfx.enable(Causal(), **given).options) == asked
    with streamfx.configure(**given):
        assert streamfx.options.resolved() == asked
    with streamfx.configure(save="inputs"):
        assert streamfx.options.resolved(Options(chunk_size=6)) == asked
    compiled = torch.compile(nn.Linear(4, 4), backend="streambp", options=asked)  # type: ignore[call-overload]
    assert compiled(torch.ones(1, 4)).shape == (1, 4)
