"""What `streamfx.plan` is given: keys of a configuration that are nearly known, and inputs of a model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import streamfx
from streamfx.tools.planner.models import configuration
from tests.test_plan import TINY


@pytest.mark.parametrize(
    ("given", "key", "meant"),
    [
        ({"model_type": "llama", "hidden_sise": 64}, "hidden_sise", "hidden_size"),
        ({"model_type": "llama", "num_layers": 2}, "num_layers", "num_hidden_layers"),
        ({"model_type": "qwen3", "vocabSize": 64}, "vocabSize", "vocab_size"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_sizes": 64}},
            "vocab_sizes",
            "vocab_size",
        ),
    ],
)
def test_keys_that_are_nearly_known_are_refused(given: dict[str, Any], key: str, meant: str, tmp_path: Path) -> None:
    """transformers keeps them, and takes the default. `plan` asks for configurations so."""
    (tmp_path / "config.json").write_text(json.dumps(given))
    for source in (given, str(tmp_path)):
        with pytest.raises(streamfx.PlanError, match=f"does not know\n.*found '{key}'\n.*did you mean '{meant}'"):
            configuration(source)


def test_other_keys_of_a_configuration_are_there_for_others() -> None:
    """Those of which the like is given, too, those that classes read and do not keep, and those that are like none."""
    extras = {"num_hidden_layers_of_draft": 3, "rope_theta": 1e6, "torch_dtype": "bfloat16", "unsloth_fixed": True}
    assert configuration({**TINY, **extras, "sep_token_id": 3}).num_hidden_layers == TINY["num_hidden_layers"]


def test_inputs_of_a_models_own_are_as_many_as_was_asked_for() -> None:
    """The first of them need not be a batch, and one length more may be too long."""

    def inputs(batch: int, length: int) -> dict[str, Any]:
        if length < 64:
            raise ValueError("no less")
        return {"positions": torch.empty(length, device="meta"), "x": torch.empty(batch, length, 4, device="meta")}

    report = streamfx.plan(Placed(4, 4, device="meta"), seq=64, inputs=inputs, baselines=False)
    assert report.summary()["batch"] == 1 and "1 x 64 tokens" in str(report)


class Placed(torch.nn.Linear):
    def forward(self, positions: Any, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x + positions[:, None]).square().mean()
