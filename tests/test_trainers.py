"""Real trainers have the same losses, metrics and final weights with `streamfx.enable` as without it (float32, 1e-5)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from streamfx import IntegrationError
from streamfx.integrations import enable, heads, minimum_versions
from tests.support.tables import named_cases
from tests.support.trainers import tiny  # noqa: F401  (in tests/tables)
from tests.support.trainers.building import build
from tests.support.trainers.running import (
    assert_same_history,
    assert_same_training,
    assert_same_weights,
    enabled,
    history,
    weights,
)

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without network and progress bars."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    import datasets
    from accelerate.state import AcceleratorState

    datasets.disable_progress_bars()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # otherwise later trainers inherit this one's state


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An adapter of PEFT, which ignores an old torchao."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)


def test_transformers_trainer_is_the_same(tmp_path: Path) -> None:
    """With evaluation, metrics from logits, accumulation (`num_items_in_batch`) and the model's gradient checkpointing."""

    def accuracy(given: Any) -> dict[str, float]:
        return {"accuracy": float((given.predictions[:, :-1] == given.label_ids[:, 1:]).mean())}

    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "compute_metrics": accuracy}
    arguments |= {"eval_strategy": "steps", "eval_steps": 1}
    arguments["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    trainer, done = assert_same_training(lambda: build("transformers", tmp_path, **arguments))
    assert any("eval_accuracy" in entry for entry in trainer.state.log_history)
    assert "the full model" in str(done)


PLAIN = ("sft", "dpo", "kto", "grpo", "rloo", "reward")
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {name: (name, None, {}) for name in PLAIN} | named_cases("cases", globals())


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str, tmp_path: Path) -> None:
    kind, data, arguments = CASES[name]
    if kind != "transformers":
        pytest.importorskip("trl")
    tolerance = 1e-2 if "16" in name else 1e-5
    _, done = assert_same_training(lambda: build(kind, tmp_path, data=data and data(), **arguments), tolerance)
    assert ("the backbone" in str(done)) == (kind not in ("reward", "transformers"))
    if name in ("grpo", "rloo"):  # generation runs in eager
        assert done.calls["model.model"].counts.plain >= 2 * 8
    if name in ("dpo", "grpo"):
        assert done.calls["ref_model.model"].counts.compiled


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_training_with_lora_is_the_same(name: str, tmp_path: Path, lora: Any) -> None:
    pytest.importorskip("trl")
    _, done = assert_same_training(lambda: build(name, tmp_path, peft=lora, gradient_checkpointing=True))
    assert list(done.calls) == ["model.base_model.model.model"]


def test_resumed_training_equals_training_without_a_pause(tmp_path: Path) -> None:
    """A saved model has the usual files."""
    plain = build("transformers", tmp_path / "plain", max_steps=4)
    plain.train()
    first = build("transformers", tmp_path / "streamed", max_steps=2, save_strategy="steps", save_steps=2)
    second = build("transformers", tmp_path / "streamed", max_steps=4)
    with enabled(first):
        first.train()
    with enabled(second):
        second.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-2"))
        second.save_model(str(tmp_path / "saved"))
    assert_same_history(history(second)[:-1], history(plain)[:-1], 1e-5)  # the last line is a mean over the steps of one run
    loaded = type(plain.model).from_pretrained(tmp_path / "saved")
    assert_same_weights(weights(loaded), weights(plain.model), 1e-5)


def test_the_head_of_trl_is_narrowed_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils, before = pytest.importorskip("trl.trainer.utils"), 32_768
    monkeypatch.setattr(utils, heads.WIDTH_NAME, before)  # other tests leave their trainers enabled
    monkeypatch.setattr(heads, "_narrowed_widths", {})
    first, second = enable(build("dpo", tmp_path)), enable(build("sft", tmp_path))
    assert before > utils._CHUNKED_LOGPROB_CHUNK_SIZE > 0
    first.disable()
    assert before > utils._CHUNKED_LOGPROB_CHUNK_SIZE
    second.disable()
    second.disable()
    assert before == utils._CHUNKED_LOGPROB_CHUNK_SIZE


OLD = [("trl", "1.14.2"), ("transformers", "4.57.1"), ("accelerate", "1.0.0"), ("peft", "0.18.1")]


@pytest.mark.parametrize(("name", "found"), OLD)
def test_old_libraries_are_refused(name: str, found: str, tmp_path: Path, lora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled. Libraries that no trainer here uses do not matter."""
    pytest.importorskip("trl")
    trainer = build("sft", tmp_path, peft=lora)
    monkeypatch.setattr(minimum_versions, "installed_version", lambda asked: found if asked == name else "99.0")
    with pytest.raises(IntegrationError, match=rf"(?s){name} {found}, which defines \w+.*pip install '{name}>="):
        enable(trainer)
    assert all(module._compiled_call_impl is None for module in trainer.model.modules())
    monkeypatch.setattr(minimum_versions, "installed_version", lambda asked: found if asked == "lightning" else None)
    with enable(trainer) as done:
        assert done.is_enabled


def test_the_extra_of_the_package_requires_the_minimum_versions() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    asked = dict(re.findall(r'"(\w+)>=([\d.]+)', text.split("\ntrl = [", 1)[1].split("\ndocs = [", 1)[0]))
    assert {name: asked[name] for name in minimum_versions.MIN_VERSIONS} == minimum_versions.MIN_VERSIONS


def test_a_trainer_that_compiles_is_refused(tmp_path: Path) -> None:
    """accelerate refuses unknown backends: docs/trainers.md has the way around it."""
    with pytest.raises(ValueError, match="'STREAMBP' is not a valid DynamoBackend"):
        build("transformers", tmp_path, torch_compile=True, torch_compile_backend="streambp")
    with pytest.raises(IntegrationError, match="is configured to compile it"):
        enable(build("transformers", tmp_path, torch_compile_backend="eager"))
