"""`StreamCallback` in a real trainer, and the plugins of `examples/plugins` for launchers that create the trainer themselves.

A callback streams while the trainer trains, with eager's losses and weights (float32, 1e-5). Stand-ins have the interface that
the source of Axolotl, LLaMA-Factory and ms-swift shows.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("pydantic")

import streamfx
from streamfx.integrations import StreamArguments, StreamCallback
from tests.support.trainers.building import build
from tests.support.trainers.running import assert_same_history, assert_same_weights, history, weights

pytestmark = pytest.mark.compiled

FOLDER = Path(__file__).parents[1] / "examples" / "plugins"
OPTIONS: dict[str, Any] = {"chunk_size": 7, "loss_chunk_size": 7}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    for plugin in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, plugin.stem, raising=False)


def trained(folder: Path, callback: Any = None, **arguments: Any) -> Any:
    trainer = build("transformers", folder, **arguments)
    if callback is not None:
        trainer.add_callback(callback)
    torch.manual_seed(3)
    trainer.train()
    return trainer


def assert_streamed(callback: Any, text: str, lengths: int = 1) -> None:
    lines = [line for line in text.splitlines() if line.startswith("streamfx: ")]
    assert len(lines) == 1 and "every stage streams, 7 rows per chunk" in lines[0], lines
    assert callback.enabled is not None and not callback.enabled.is_enabled
    assert callback.enabled.calls["model"].counts.compiled == lengths


def test_training_with_the_callback_equals_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, callback = trained(tmp_path), StreamCallback(**OPTIONS)
    capsys.readouterr()
    streamed = trained(tmp_path, callback)
    assert_streamed(callback, capsys.readouterr().out, lengths=2)
    assert streamed.model._compiled_call_impl is None
    assert_same_history(history(streamed), history(plain), 1e-5)
    assert_same_weights(weights(streamed.model), weights(plain.model), 1e-5)


@pytest.mark.long
def test_an_enabled_model_stays_enabled(tmp_path: Path) -> None:
    trainer, callback = build("transformers", tmp_path, max_steps=1), StreamCallback(chunk_size=7)
    with streamfx.enable(trainer, chunk_size=7) as before:
        trainer.add_callback(callback)
        trainer.train()
        assert callback.enabled is before and before.is_enabled


def test_wrong_options_and_trainers_that_compile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(streamfx.OptionError, match="did you mean 'chunk_size'"):
        StreamCallback(chunksize=7)
    with pytest.raises(streamfx.IntegrationError, match="is configured to compile it"):
        trained(tmp_path, StreamCallback(), torch_compile_backend="eager")


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Put a module of this name, and its packages, into `sys.modules`."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(content)


def test_axolotl_reads_options_and_refuses_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=object)
    plugin = importlib.import_module("streamfx_axolotl").StreamPlugin()
    module, name = plugin.get_input_args().rsplit(".", 1)  # as Axolotl does
    read = getattr(importlib.import_module(module), name)
    for given in ({}, OPTIONS):
        (callback,) = plugin.add_callbacks_pre_trainer(read(streamfx=given) if given else read(), None)
        assert isinstance(callback, StreamCallback) and callback.options == given
    with pytest.raises(streamfx.OptionError, match="did you mean 'chunk_size'"):
        plugin.add_callbacks_pre_trainer(SimpleNamespace(streamfx={"chunksize": 7}), None)


def test_llamafactory_trains_with_the_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []

    def run_exp(args: Any = None, callbacks: Any = None) -> None:
        given.extend(callbacks)
        trained(tmp_path, *callbacks, max_steps=1)

    stand_in(monkeypatch, "llamafactory.train.tuner", run_exp=run_exp)
    monkeypatch.setenv("STREAMFX_OPTIONS", json.dumps(OPTIONS))
    importlib.import_module("train_llamafactory").main()
    (callback,) = given
    assert_streamed(callback, capsys.readouterr().out)


def test_ms_swift_finds_the_callback_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a table of functions of the arguments and the trainer."""
    callbacks: dict[str, Any] = {}
    stand_in(monkeypatch, "swift.callbacks", callbacks_map=callbacks)
    importlib.import_module("streamfx_swift")
    assert isinstance(callbacks["streamfx"](SimpleNamespace(), None), StreamCallback)


def test_arguments_of_a_script_become_a_callback() -> None:
    from transformers import HfArgumentParser

    def read(*words: str) -> Any:
        (found,) = HfArgumentParser(StreamArguments).parse_args_into_dataclasses(list(words))
        return found

    assert read().callbacks() == []
    (callback,) = read("--stream", "--stream_options", '{"chunk_size": 7}').callbacks()
    assert isinstance(callback, StreamCallback) and callback.options == {"chunk_size": 7}
    (callback,) = StreamArguments(True, {"chunk_size": 7}).callbacks()  # type: ignore[arg-type]  # of a YAML file
    assert callback.options == {"chunk_size": 7}
    for wrong in ("chunk_size: 7", '{"chunksize": 7}'):
        with pytest.raises(streamfx.OptionError):
            read("--stream", "--stream_options", wrong).callbacks()
