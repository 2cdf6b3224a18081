"""Options by name, as a dictionary and as an object, for a block, a call or the process; `enable` and `disable`."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamfx
from streamfx import IntegrationError, OptionError, Options
from streamfx.options import resolve_options
from streamfx.runtime.rng import draw_seed
from tests.support.small import Causal, tokens

IDS = tokens(2, 24)


@pytest.fixture(autouse=True)
def no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(streamfx.options.ENVIRONMENT, raising=False)
    monkeypatch.setattr(streamfx.options, "_process_layers", [])


def test_blocks_may_end_in_any_order() -> None:
    one, other = streamfx.configure(chunk_size=3), streamfx.configure(chunk_size=4, loss_chunk_size=5)
    one.__enter__()
    other.__enter__()
    one.__exit__()
    assert (resolve_options().chunk_size, resolve_options().loss_chunk_size) == (4, 5)
    other.__exit__()
    assert resolve_options() == Options()


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    worker = threading.Thread(target=function)
    worker.start()
    return worker


def test_another_thread_does_not_see_the_options_of_a_block() -> None:
    seen: list[object] = []
    block = streamfx.configure(chunk_size=7)
    (worker := in_a_thread(lambda: seen.append(resolve_options().chunk_size))).join(0.1)
    with block:
        worker.join()
    assert seen == ["auto"]


def test_a_call_sets_options_of_all_threads_until_its_result_is_used_as_a_block() -> None:
    seen: list[object] = []

    def look() -> None:
        in_a_thread(lambda: seen.append((resolve_options().chunk_size, resolve_options().loss_chunk_size))).join()

    streamfx.configure(chunk_size=3)
    kept = streamfx.configure(loss_chunk_size=4)
    look()
    with kept:
        look()
        assert resolve_options().loss_chunk_size == 4
        assert resolve_options({"loss_chunk_size": 5}).loss_chunk_size == 5
    assert resolve_options().loss_chunk_size == "auto"
    assert seen == [(3, 4), (3, "auto")]


def test_a_block_ends_in_all_contexts() -> None:
    block, context = streamfx.configure(chunk_size=3), contextvars.copy_context()
    context.run(block.__enter__)
    assert context.run(lambda: resolve_options().chunk_size) == 3
    block.__exit__()
    assert context.run(lambda: resolve_options().chunk_size) == "auto"


@pytest.mark.compiled
def test_seeds_are_drawn_on_the_cpu() -> None:
    """Not on the default device: the host reads them, and would wait for the device."""
    x = torch.ones(2, 37, 8, dtype=torch.float64, requires_grad=True)
    function = torch.compile(lambda x: F.dropout(x * 1.0, 0.4), backend="streambp", options={"chunk_size": 5})
    with torch.device("meta"):
        assert draw_seed().device.type == "cpu"
        (gradient,) = torch.autograd.grad((out := function(x)).sum(), x)
    assert torch.equal(gradient, out)


# -- enable


class Trainer:
    """The attributes that `enable` needs."""

    def __init__(self, model: Any, ref_model: Any = None) -> None:
        self.model, self.ref_model = model, ref_model


def test_enabling_again_with_equal_options_changes_nothing() -> None:
    model = Causal()
    first = streamfx.enable(model, chunk_size=5)
    installed = model._compiled_call_impl
    assert streamfx.enable(Trainer(model), options={"chunk_size": 5}) is first
    assert streamfx.enable(model, options=Options(chunk_size=5)) is first
    for wrong in ({"chunk_size": 0}, {"chunksize": 7}, {"dynamic": "yes"}):
        with pytest.raises(OptionError):
            streamfx.enable(model, **wrong)
    assert model._compiled_call_impl is installed and first.is_enabled and first.options == {"chunk_size": 5}


@pytest.mark.compiled
def test_other_options_replace_the_first(caplog: pytest.LogCaptureFixture) -> None:
    model = Causal().double()
    first = streamfx.enable(model, chunk_size=5)
    before = model(IDS, IDS)
    with caplog.at_level("WARNING", "streamfx"):
        second = streamfx.enable(model, chunk_size=7)
    assert "enabled with options {'chunk_size': 5}; they are replaced by {'chunk_size': 7}" in caplog.text
    assert second.is_enabled and not first.is_enabled
    assert torch.allclose(model(IDS, IDS), before, rtol=1e-12)
    assert second.calls["model"].counts.compiled == 1
    assert streamfx.enable(model, chunk_size=7, dynamic=True) is not second
    first.disable()  # is off already: the second stays
    assert model._compiled_call_impl is not None


def test_a_refused_trainer_is_unchanged() -> None:
    trainer = Trainer(Causal(), Causal())
    with (
        streamfx.enable(trainer.ref_model),
        pytest.raises(IntegrationError, match="ref_model in place, but it is already compiled"),
    ):
        streamfx.enable(trainer)
    trainer.ref_model = torch.compile(trainer.ref_model)
    with pytest.raises(IntegrationError, match="already compiled"):
        streamfx.enable(trainer)
    assert trainer.model._compiled_call_impl is None


def test_disable_undoes_one_enable_for_any_of_its_modules() -> None:
    for choose in (
        lambda trainer, done: trainer,
        lambda trainer, done: trainer.model,
        lambda trainer, done: nn.Sequential(trainer.ref_model),
        lambda trainer, done: done,
    ):
        trainer = Trainer(Causal(), Causal())
        done = streamfx.enable(trainer)
        for _ in range(2):
            streamfx.disable(choose(trainer, done))
            assert not done.is_enabled
            assert trainer.model._compiled_call_impl is None and trainer.ref_model._compiled_call_impl is None


GIVEN: list[dict[str, Any]] = [
    {"options": {"chunk_size": 6, "save": "inputs"}},
    {"chunk_size": 6, "save": "inputs"},
    {"options": Options(chunk_size=6), "chunk_size": 6, "save": "inputs"},
]


@pytest.mark.compiled
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_options_have_three_forms(given: dict[str, Any]) -> None:
    asked = Options(chunk_size=6, save="inputs")
    assert streamfx.explain(Causal(), IDS, IDS, **given).call.options == asked
    assert Options(**streamfx.enable(Causal(), **given).options) == asked
    with streamfx.configure(**given):
        assert resolve_options() == asked
    with streamfx.configure(save="inputs"):
        assert resolve_options(Options(chunk_size=6)) == asked
    compiled = torch.compile(nn.Linear(4, 4), backend="streambp", options=asked)  # type: ignore[call-overload]
    assert compiled(torch.ones(1, 4)).shape == (1, 4)


# -- torch.compile is switched off


@contextmanager
def by_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "TORCHDYNAMO_DISABLE": by_environment,
    "config.disable": lambda: torch._dynamo.config.patch(disable=True),
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
}


@pytest.mark.compiled
@pytest.mark.parametrize("switch", SWITCHES)
def test_calls_are_counted_as_not_compiled_while_compilation_is_off(switch: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before `enable`, and after it."""
    model, off = Causal(), SWITCHES[switch]
    with off():
        done = streamfx.enable(model, chunk_size=8)
        assert "nothing is compiled, because torch.compile is switched off: unset TORCHDYNAMO_DISABLE" in caplog.text
        model(IDS, IDS).backward()
        assert "nothing is compiled: torch.compile is switched off" in str(done)
        assert "0 calls through streambp, 1 in eager" in str(done) and not done.compiled
    model(IDS, IDS).backward()
    stays = off is by_environment  # torch.compile has returned the model itself
    assert ("0 calls through streambp, 2" if stays else "1 calls through streambp, 1") + " in eager" in str(done)
    assert ("switched off" in str(done)) == stays
    done = streamfx.enable(later := Causal(), chunk_size=8)
    later(IDS, IDS).backward()
    assert "1 calls through streambp, 0 in eager" in str(done) and "switched off" not in str(done)
    with off():
        later(IDS, IDS).backward()
        assert "1 calls through streambp, 1 in eager" in str(done) and "switched off" in str(done)
        for look in (streamfx.explain, streamfx.verify):
            with pytest.raises(streamfx.StreamFXError, match=r"(?s)compile is switched off.*TORCHDYNAMO_DISABLE.*force_eager"):
                look(Causal(), IDS, IDS, chunk_size=8)


def test_a_layer_is_not_called_a_full_model() -> None:
    text = str(streamfx.enable(nn.Linear(4, 4)))
    assert "full model" not in text and "model (Linear): its forward" in text
