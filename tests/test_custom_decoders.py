"""The gallery of decoders in `examples/custom_decoders/`: each one streams in all its stages, and is exact."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import streamfx

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[1] / "examples" / "custom_decoders"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "running"))
def test_decoder_streams(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    decoder = importlib.import_module(name)
    model, inputs = decoder.example(48)
    monkeypatch.setattr(sys.modules["running"], "CHUNKS", {"chunk_size": 20, "loss_chunk_size": 13})
    decoder.show(model, *inputs, steps=1)
    shown = capsys.readouterr().out
    assert "every stage streams" in shown and "the same as eager" in shown
    exact = streamfx.verify(model.double(), *inputs, options={"chunk_size": 7, "loss_chunk_size": 13})
    assert exact.max_error < (1e-12 if name != "unbatched_rope" else 1e-6), exact  # that one takes its loss in float32
