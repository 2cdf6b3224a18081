"""Plugins for launchers that make the trainer themselves, in `examples/plugins`.

Each runs against a stand-in with the launcher's interface as its source shows it, whose trainer is a real one of transformers.
Where Axolotl or LLaMA-Factory is installed, the plugin also has to fit the package itself; neither was, where this was written.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("pydantic")

import streamfx
from tests.support.trainers.building import build

FOLDER = Path(__file__).parents[1] / "examples" / "plugins"
OPTIONS = {"chunk_size": 7, "loss_chunk_size": 7}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    for plugin in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, plugin.stem, raising=False)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of this name, inside of packages."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(content)


class BasePlugin:
    """Axolotl's, as far as a plugin is asked for anything before a trainer is built."""

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []


def assert_streamed(callback: Any, told: str) -> None:
    assert "every stage streams, 7 rows per chunk" in told
    assert callback.enabled is not None and not callback.enabled.is_enabled
    assert callback.enabled.calls["model"].counts.compiled == 1


@pytest.mark.long
def test_axolotl_builds_trainers_that_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=BasePlugin)
    plugin = importlib.import_module("streamfx_axolotl").StreamPlugin()
    module, name = plugin.get_input_args().rsplit(".", 1)  # as Axolotl does with it
    read = getattr(importlib.import_module(module), name)(streamfx=OPTIONS)
    trainer = build("transformers", tmp_path, max_steps=1)
    (callback,) = plugin.add_callbacks_pre_trainer(read, trainer.model)
    trainer.add_callback(callback)
    trainer.train()
    assert_streamed(callback, capsys.readouterr().out)


def test_axolotl_needs_no_options_and_refuses_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=BasePlugin)
    module = importlib.import_module("streamfx_axolotl")
    (callback,) = module.StreamPlugin().add_callbacks_pre_trainer(module.StreamArgs(), None)
    assert callback.options == {}
    with pytest.raises(streamfx.OptionError, match="did you mean 'chunk_size'"):
        module.StreamPlugin().add_callbacks_pre_trainer(SimpleNamespace(streamfx={"chunksize": 7}), None)


def test_llamafactory_trains_with_the_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []

    def run_exp(args: dict[str, Any] | None = None, callbacks: list[Any] | None = None) -> None:
        trainer = build("transformers", tmp_path, max_steps=1)
        for callback in callbacks or []:
            trainer.add_callback(callback)
            given.append(callback)
        trainer.train()

    stand_in(monkeypatch, "llamafactory.train.tuner", run_exp=run_exp)
    monkeypatch.setenv("STREAMFX_OPTIONS", json.dumps(OPTIONS))
    importlib.import_module("train_llamafactory").main()
    (callback,) = given
    assert_streamed(callback, capsys.readouterr().out)


def test_axolotl_itself() -> None:
    manager = pytest.importorskip("axolotl.integrations.base").PluginManager.get_instance()
    manager.register("streamfx_axolotl.StreamPlugin")
    assert manager.get_input_args() == ["streamfx_axolotl.StreamArgs"]
    (callback,) = manager.add_callbacks_pre_trainer(SimpleNamespace(streamfx=OPTIONS), None)
    assert callback.options == OPTIONS


def test_llamafactory_itself() -> None:
    tuner = pytest.importorskip("llamafactory.train.tuner")
    assert {"args", "callbacks"} <= set(inspect.signature(tuner.run_exp).parameters)
