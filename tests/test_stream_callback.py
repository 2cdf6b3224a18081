"""`StreamCallback` in a real trainer: on while it trains, off behind it, with eager's losses and weights (float32, 1e-5)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import streamfx
from streamfx.integrations import StreamCallback
from tests.support.trainers.building import build
from tests.support.trainers.running import assert_same_history, assert_same_weights, history, weights


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def trained(folder: Path, callback: StreamCallback | None = None) -> Any:
    trainer = build("transformers", folder)
    if callback is not None:
        trainer.add_callback(callback)
    torch.manual_seed(3)
    trainer.train()
    return trainer


def test_it_trains_as_eager_does_and_undoes_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, callback = trained(tmp_path), StreamCallback(chunk_size=7, loss_chunk_size=7)
    capsys.readouterr()
    streamed = trained(tmp_path, callback)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("streamfx: ")]
    assert len(told) == 1 and "every stage streams, 7 rows per chunk" in told[0], told
    assert callback.enabled is not None and not callback.enabled.is_enabled
    assert callback.enabled.calls["model"].counts.compiled == 2
    assert streamed.model._compiled_call_impl is None
    assert_same_history(history(streamed), history(plain), 1e-5)
    assert_same_weights(weights(streamed.model), weights(plain.model), 1e-5)


def test_what_was_enabled_before_stays_enabled(tmp_path: Path) -> None:
    trainer, callback = build("transformers", tmp_path, max_steps=1), StreamCallback(chunk_size=7)
    with streamfx.enable(trainer, chunk_size=7) as before:
        trainer.add_callback(callback)
        trainer.train()
        assert callback.enabled is before and before.is_enabled


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(streamfx.OptionError, match="did you mean 'chunk_size'"):
        StreamCallback(chunksize=7)
    trainer = build("transformers", tmp_path, torch_compile_backend="eager")
    trainer.add_callback(StreamCallback())
    with pytest.raises(streamfx.IntegrationError, match="was told to do so"):
        trainer.train()


def test_the_callback_alone_imports_transformers() -> None:
    code = "import sys, streamfx.integrations\nassert 'transformers' not in sys.modules\n"
    code += "streamfx.integrations.StreamCallback\nassert 'transformers' in sys.modules\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
