"""Names of what is planned: those that help shows are those that there are, and a configuration is found by any of its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import streamfx
from streamfx.cli import main
from streamfx.planner import devices, models, names, objectives, optimizers, quantized, shards
from streamfx.planner.names import config_file


def test_names_are_those_of_the_tables() -> None:
    assert tuple(models.TYPES) == names.TYPES
    assert objectives.OBJECTIVES == names.OBJECTIVES
    assert tuple(optimizers.STATES) == names.OPTIMIZERS
    assert tuple(quantized.SCHEMES) == names.SCHEMES
    assert shards.SHARDS == names.SHARDS
    assert tuple(devices.PUBLISHED) == names.DEVICES


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a model that has been downloaded, as the hub's library lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some-org--some-model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    path = folder / "snapshots" / "abc" / "config.json"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    return path


def test_a_configuration_has_many_names(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = names.FOLDER / "Qwen3-8B.json"
    assert config_file("Qwen3-8B") == config_file("qwen3-8b") == config_file("Qwen/Qwen3-8B") == config_file(shipped) == shipped
    assert config_file("some-org/some-model") == config_file(cached.parent) == cached
    monkeypatch.chdir(tmp_path)
    Path("Qwen").mkdir()
    assert config_file("Qwen/Qwen3-8B") == shipped
    Path("Qwen/Qwen3-8B").mkdir()
    with pytest.raises(streamfx.PlanError, match=r"has no config\.json"):
        config_file("Qwen/Qwen3-8B")
    Path("Qwen/Qwen3-8B/config.json").write_text("{}")
    assert config_file("Qwen/Qwen3-8B") == Path("Qwen/Qwen3-8B/config.json")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3-9B", "did you mean 'Qwen3-8B'?"),
        ("lama-3.1-8b", "did you mean 'Llama-3.1-8B'?"),
        ("Qwen/Qwen3-80B", "did you mean 'Qwen3-8B'? `hf download Qwen/Qwen3-80B config.json` puts it into the cache"),
        ("some-org/another", "`hf download some-org/another config.json`"),
        *(
            (name, "do    give a path, or one of GPT-OSS-20B")
            for name in ("../nowhere", "an org/with -- odd..letters", "xyz", "~/my-model")
        ),
    ],
)
def test_a_wrong_name_says_what_was_meant(cached: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 1
    found = capsys.readouterr().err
    assert f"there is no configuration {name!r}" in found and said in found
    assert ("hf download" in found) == ("hf download" in said)


def test_a_cached_model_is_planned(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["plan", "some-org/some-model", "--seq", "64", "--no-baselines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "some-model"
