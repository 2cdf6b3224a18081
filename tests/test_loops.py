"""`streamfx.enable` in loops that people write themselves: PEFT, accelerate, Lightning, generation."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import streamfx
from streamfx.integrations import enable
from tests.support.spread import only
from tests.support.trainers import tiny

pytestmark = pytest.mark.compiled


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT, where an old torchao beside it is not looked at."""
    module = pytest.importorskip("peft")
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    return module


def batch(seed: int = 0, length: int = 19) -> dict[str, Tensor]:
    ids = torch.randint(8, 60, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module, call: Callable[..., Any]) -> dict[str, Tensor]:
    model.zero_grad()
    output = call(**batch())
    output.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": output.loss.detach(), **found}


def assert_close(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    scale = sum(float(value.square().sum()) for value in wanted.values()) ** 0.5
    for name, value in wanted.items():
        assert float((actual[name] - value).norm()) <= 1e-12 * max(float(value.norm()), 1e-3 * scale), name


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "rslora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "oft": ("OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj", "down_proj"]}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "target_modules": ["v_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}


def adapted(peft: Any, kind: str) -> Any:
    name, given = KINDS[kind]
    return peft.get_peft_model(tiny.causal_model(), getattr(peft, name)(task_type="CAUSAL_LM", **given)).double()


@pytest.mark.parametrize("kind", only(["lora"], KINDS))
def test_adapters(kind: str, peft: Any) -> None:
    """Checkpointed as trainers do it; rotations of weights solve equations of weights, and leave the layers their loops."""
    model = adapted(peft, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    keys = list(model.state_dict())
    truth = gradients(model, model)
    if kind == "lora":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    with enable(model, chunk_size=5) as done:
        assert_close(gradients(model, model), truth)
        assert list(model.state_dict()) == keys
    assert done.calls["model"].counts.compiled == 1
    if kind in ("oft", "boft"):
        shown = streamfx.explain(model, **batch(), options={"chunk_size": 5}).summary(with_baseline=False)
        assert {stage["kind"] for stage in shown["stages"]} == {"streamed"} and shown["streamed_flops_share"] > 0.8


@pytest.mark.long
def test_weights_with_a_magnitude_are_one_graph_while_a_model_is_enabled(peft: Any) -> None:
    """peft asks in each layer whether a weight is quantized, in a way that Dynamo does not trace."""
    asks = vars(importlib.import_module("peft.tuners.lora.dora"))
    model, before = adapted(peft, "dora"), asks["dequantize_module_weight"]
    truth = gradients(model, model)
    torch._dynamo.reset()
    with enable(model, chunk_size=5) as done, enable(tiny.causal_model()):
        assert_close(gradients(model, model), truth)
        assert len(done.compiled) == 1, done
    assert asks["dequantize_module_weight"] is before


@pytest.mark.long
def test_lightnings_trainer(tmp_path: Path) -> None:
    """It calls the model inside of its module, whose parameters it updates."""
    lightning: Any = pytest.importorskip("lightning")
    base: Any = lightning.LightningModule
    batches: Any = [batch(step) for step in range(3)]

    class Training(base):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = []
    for is_enabled in (True, False):
        model = tiny.causal_model().double()
        before = copy.deepcopy(model.state_dict())
        with enable(model, chunk_size=5) if is_enabled else nullcontext() as done:
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
            trainer.fit(Training(model), torch.utils.data.DataLoader(batches, batch_size=None))
        assert done is None or done.calls["model"].counts.compiled == 3
        found.append(dict(model.state_dict()))
    assert_close(*found)
    assert any(not torch.equal(value, before[name]) for name, value in found[0].items())


def test_generation_runs_as_it_was_and_training_keeps_no_cache() -> None:
    """`use_cache` is on by default: in training nobody reads the keys and values of every layer."""
    model: Any = tiny.causal_model().eval()
    prompt = batch(length=5)["input_ids"]
    wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with enable(model, chunk_size=5) as done:
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
        assert done.calls["model"].counts.compiled == 0
        model.train()
        assert model(**batch()).get("past_key_values") is None
        with torch.no_grad():
            assert model(**batch()).past_key_values is not None
        assert model(**batch(), use_cache=True).past_key_values is not None


def test_nothing_is_left_behind() -> None:
    """A wrapped module is the one that is enabled."""
    model: Any = tiny.causal_model()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()

    def seen() -> list[Any]:
        return [(module.__dict__.get("gradient_checkpointing"), len(module._forward_hooks)) for module in model.modules()]

    before = seen()
    done = enable(torch.nn.DataParallel(model), chunk_size=5)
    assert done.targets[0].module is model
    assert copy.deepcopy(model)._compiled_call_impl is None
    model(**batch()).loss.backward()
    assert before == seen()
    for _ in range(2):
        done.disable()
    assert before == seen() and model._compiled_call_impl is None and "off" in str(done)
