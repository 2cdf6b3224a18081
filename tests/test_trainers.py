"""Real trainers with `streamfx.enable`: the same losses, metrics and final weights as without it (float32, 1e-5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from streamfx import IntegrationError
from streamfx.integrations import enable, heads, minimum_versions
from streamfx.lazy import steps
from streamfx.lazy import streamed as in_chunks
from tests.support.spread import only
from tests.support.trainers import tiny
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

TRL = ("sft", "dpo", "kto", "grpo", "rloo", "reward")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, no progress bars, caches of data sets in the test's own folder."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    import datasets
    from accelerate.state import AcceleratorState

    datasets.disable_progress_bars()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # what one trainer asks for would hold for all later ones


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT, where an old torchao beside it is not looked at."""
    module = pytest.importorskip("peft")
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    return module


def lora(peft: Any, **more: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, **more)


# -- transformers


def test_transformers_trainer(tmp_path: Path) -> None:
    """With evaluation, metrics from logits, accumulation (`num_items_in_batch`) and the model's own checkpointing asked for."""

    def accuracy(given: Any) -> dict[str, float]:
        return {"accuracy": float((given.predictions[:, :-1] == given.label_ids[:, 1:]).mean())}

    trainer, done = assert_same_training(
        lambda: build(
            "transformers",
            tmp_path,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            eval_strategy="steps",
            eval_steps=1,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
    )
    assert any("eval_accuracy" in entry for entry in trainer.state.log_history)
    assert "the whole model" in str(done)


@pytest.mark.long
def test_label_smoothing_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer computes this loss from the logits that the model returned: it is made in chunks, as for large logits."""
    monkeypatch.setattr(steps, "LEAST", 64)
    monkeypatch.setattr(in_chunks, "_forms", {})
    assert_same_training(lambda: build("transformers", tmp_path, label_smoothing_factor=0.1))
    streamed = [form for forms in in_chunks._forms.values() for form in forms if form.run is not in_chunks._nothing]
    assert len(streamed) >= 3  # two sums and the gradients


@pytest.mark.parametrize("precision", only([], ["bf16", "fp16"]))
def test_mixed_precision(precision: str, tmp_path: Path) -> None:
    assert_same_training(lambda: build("transformers", tmp_path, **{precision: True}), tolerance=1e-2)


@pytest.mark.long
def test_resume_and_save(tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more: the same weights as four steps without the backend; files as they always were."""
    plain = build("transformers", tmp_path / "plain", max_steps=4)
    plain.train()
    first = build("transformers", tmp_path / "streamed", max_steps=2, save_strategy="steps", save_steps=2)
    with enabled(first):
        first.train()
    second = build("transformers", tmp_path / "streamed", max_steps=4)
    with enabled(second):
        second.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-2"))
        second.save_model(str(tmp_path / "saved"))
    assert_same_history(history(second)[:-1], history(plain)[:-1], 1e-5)  # the last line is a mean over the steps of one run
    loaded = type(plain.model).from_pretrained(tmp_path / "saved")
    assert_same_weights(weights(loaded), weights(plain.model), 1e-5)


@pytest.mark.long
def test_lengths_that_always_change(tmp_path: Path) -> None:
    """Training and evaluation on ever other lengths: two graphs each, one for the first length and one for all others."""
    data = tiny.texts(words=9)
    for number, words in enumerate((14, 11, 23, 17, 12)):
        rows = [{"text": tiny.sentence(words, 10 * number + i)} for i in range(2)]
        data = tiny.joined(data, rows)
    compiled: list[Any] = []
    torch._dynamo.reset()
    trainer = build("transformers", tmp_path, model=tiny.causal_model(num_hidden_layers=1), data=data, max_steps=9)
    with enable(trainer, chunk_size=7):
        counter = torch._dynamo.utils.counters
        counter.clear()
        trainer.train()
        compiled.append(counter["stats"]["unique_graphs"])
        trainer.evaluate(trainer.train_dataset)
        compiled.append(counter["stats"]["unique_graphs"])
    assert compiled == [2, 4]


# -- TRL


@pytest.mark.parametrize("name", only(["grpo"], TRL))
def test_trl(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    _, done = assert_same_training(lambda: build(name, tmp_path))
    assert ("the backbone" in str(done)) == (name != "reward")
    if name in ("grpo", "rloo"):  # generation has run as it was
        assert done.calls["model.model"].counts.plain >= 2 * 8
    if name in ("dpo", "grpo"):
        assert done.calls["ref_model.model"].counts.compiled


def test_the_head_of_trl_is_narrowed_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils, before = pytest.importorskip("trl.trainer.utils"), 32_768
    monkeypatch.setattr(utils, heads.NAME, before)  # other tests leave their trainers enabled
    monkeypatch.setattr(heads, "_narrowed", {})
    first, second = enable(build("dpo", tmp_path)), enable(build("sft", tmp_path))
    assert before > utils._CHUNKED_LOGPROB_CHUNK_SIZE > 0
    first.disable()
    assert before > utils._CHUNKED_LOGPROB_CHUNK_SIZE
    second.disable()
    second.disable()
    assert before == utils._CHUNKED_LOGPROB_CHUNK_SIZE


VARIANTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "packing": ("sft", None, {"packing": True, "max_length": 48}),
    "completion only": ("sft", tiny.prompts_and_completions, {"completion_only_loss": True}),
    "assistant only": ("sft", tiny.conversations, {"assistant_only_loss": True}),
    "old name": ("sft", None, {"loss_type": "chunked_nll"}),
    "smoothed": ("sft", None, {"label_smoothing_factor": 0.1}),
    "checkpointing": ("dpo", None, {"gradient_checkpointing": True}),
    "ipo": ("dpo", None, {"loss_type": ["ipo"]}),
    "sequences": ("grpo", None, {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
    "two passes": ("grpo", None, {"num_iterations": 2, "max_steps": 4}),
}


@pytest.mark.parametrize("name", only([], VARIANTS))
def test_variants_of_trl(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    kind, data, arguments = VARIANTS[name]
    assert_same_training(lambda: build(kind, tmp_path, data=data and data(), **arguments))


@pytest.mark.parametrize("name", only(["dpo"], ["sft", "dpo", "grpo"]))
def test_trl_with_lora(name: str, tmp_path: Path, peft: Any) -> None:
    pytest.importorskip("trl")
    _, done = assert_same_training(lambda: build(name, tmp_path, peft=lora(peft), gradient_checkpointing=True))
    assert list(done.calls) == ["model.base_model.model.model"]


# -- refusals


def test_the_official_way_is_closed(tmp_path: Path) -> None:
    """accelerate lists the backends that it knows: docs/trainers.md says what to do."""
    from accelerate.utils import TorchDynamoPlugin

    with pytest.raises(ValueError, match="'STREAMBP' is not a valid DynamoBackend"):
        build("transformers", tmp_path, torch_compile=True, torch_compile_backend="streambp")
    with pytest.raises(ValueError, match="'STREAMBP' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="streambp")


@pytest.mark.parametrize(
    ("name", "found"), [("trl", "1.14.2"), ("transformers", "4.57.1"), ("accelerate", "1.0.0"), ("peft", "0.18.1")]
)
def test_libraries_that_are_too_old(name: str, found: str, tmp_path: Path, peft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named with what was found and what to install, and nothing is compiled; others do not matter."""
    pytest.importorskip("trl")
    trainer = build("sft", tmp_path, peft=lora(peft))
    monkeypatch.setattr(minimum_versions, "_version", lambda asked: found if asked == name else "99.0")
    with pytest.raises(IntegrationError, match=rf"(?s){name} {found}, which \w+ comes from.*pip install '{name}>="):
        enable(trainer)
    assert all(module._compiled_call_impl is None for module in trainer.model.modules())
    monkeypatch.setattr(
        minimum_versions, "_version", lambda asked: found if asked == "lightning" else None
    )  # a checkout: no version
    with enable(trainer) as done:
        assert done.is_enabled


def test_the_least_versions_are_those_that_are_installed() -> None:
    """One table: the extra asks for what `enable` asks for."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extra = text.split("\ntrainers = [", 1)[1].split("\n]", 1)[0]
    asked = dict(re.findall(r'"(\w+)>=([\d.]+)', extra))
    assert {name: asked[name] for name in minimum_versions.LEAST} == minimum_versions.LEAST


@pytest.mark.long
def test_a_step_that_fails_can_be_followed_by_others(tmp_path: Path) -> None:
    """Labels of another shape in the second of three steps: eager's error, and the rest is what it is without that step."""
    plain, streamed = build("transformers", tmp_path, max_steps=2), build("transformers", tmp_path, max_steps=2)
    collate, calls = streamed.data_collator, []

    def wrong(rows: Any) -> Any:
        calls.append(1)
        batch = collate(rows)
        return {**batch, "labels": batch["labels"][:, 1:]} if len(calls) == 1 else batch

    torch.manual_seed(3)
    plain.train()
    before = weights(streamed.model)
    streamed.data_collator = wrong
    with enabled(streamed):
        with pytest.raises(ValueError, match="to match target batch_size"):
            streamed.train()
        assert_same_weights(weights(streamed.model), before, 0.0)
        assert streamed.model.training and all(parameter.grad is None for parameter in streamed.model.parameters())
        torch.manual_seed(3)
        streamed.train()
    assert_same_weights(weights(streamed.model), weights(plain.model), 1e-5)


def test_refusals(tmp_path: Path) -> None:
    trainer = build("transformers", tmp_path)
    with pytest.raises(IntegrationError, match="was told to do so"):
        enable(build("transformers", tmp_path, torch_compile_backend="eager"))
    with pytest.raises(IntegrationError, match="in place"):
        enable(torch.compile(tiny.causal_model()))
    with pytest.raises(IntegrationError, match="a str without"):
        enable("model")
    with pytest.raises(ValueError, match="did you mean 'chunk_size'"):
        enable(trainer, chunksize=8)
    assert trainer.model._compiled_call_impl is None
