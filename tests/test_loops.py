"""`streamfx.enable` in loops that people write themselves: PEFT, accelerate, Lightning, generation."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
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

LENGTH = 19


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT, where an old torchao beside it is not looked at."""
    module = pytest.importorskip("peft")
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    return module


def batch(seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(8, 60, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module, call: Callable[..., Any]) -> dict[str, Tensor]:
    model.zero_grad()
    output = call(**batch())
    output.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": output.loss.detach(), **found}


def assert_close(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert actual.keys() == wanted.keys()
    scale = sum(float(value.square().sum()) for value in wanted.values()) ** 0.5
    for name, value in wanted.items():
        assert float((actual[name] - value).norm()) <= tolerance * max(float(value.norm()), 1e-3 * scale), name


KINDS: dict[str, Callable[[Any], Any]] = {
    "lora": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    "rslora": lambda peft: peft.LoraConfig(r=4, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"),
    "dora": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "ia3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "oft": lambda peft: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "boft": lambda peft: peft.BOFTConfig(boft_block_size=4, target_modules=["v_proj"], task_type="CAUSAL_LM"),
    "prompt": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


ADAPTERS = [*((kind, False) for kind in KINDS), ("lora", True)]


@pytest.mark.parametrize(("kind", "checkpointing"), only([("prompt", False), ("lora", True)], ADAPTERS))
def test_adapters(kind: str, checkpointing: bool, peft: Any) -> None:
    model = peft.get_peft_model(tiny.causal_model(), KINDS[kind](peft)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    keys = list(model.state_dict())
    truth = gradients(model, model)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    with enable(model, chunk_size=5) as done:
        assert_close(gradients(model, model), truth)
        assert list(model.state_dict()) == keys
    assert done.calls["model"].counts.compiled == 1


def test_weights_with_a_magnitude_are_one_graph_while_a_model_is_enabled(peft: Any) -> None:
    """peft asks in each layer whether a weight is quantized, in a way that Dynamo does not trace."""
    config = KINDS["dora"](peft)
    asks = vars(importlib.import_module("peft.tuners.lora.dora"))
    model, before = peft.get_peft_model(tiny.causal_model(), config).double(), asks["dequantize_module_weight"]
    truth = gradients(model, model)
    torch._dynamo.reset()
    with enable(model, chunk_size=5) as done, enable(tiny.causal_model()):
        assert_close(gradients(model, model), truth)
        assert len(done.compiled) == 1, done
    assert asks["dequantize_module_weight"] is before


@pytest.mark.parametrize("kind", only(["boft"], ["oft", "boft"]))
def test_rotations_of_weights_leave_the_layers_their_loops(kind: str, peft: Any) -> None:
    """Each solves a system of equations of weights, an operator with effects."""
    model = peft.get_peft_model(tiny.causal_model(), KINDS[kind](peft))
    shown = streamfx.explain(model, **batch(), options={"chunk_size": 5}).summary(with_baseline=False)
    assert {stage["kind"] for stage in shown["stages"]} == {"streamed"}
    assert shown["streamed_flops_share"] > 0.8


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain = tiny.causal_model().double()
    model = copy.deepcopy(plain)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    other = torch.optim.SGD(plain.parameters(), 0.1)
    with enable(prepared, chunk_size=5):
        for step in range(3):
            for own, by, backward in ((prepared, optimizer, accelerator.backward), (plain, other, Tensor.backward)):
                backward(own(**batch(step)).loss)
                by.step()
                by.zero_grad()
    assert_close(dict(accelerator.unwrap_model(prepared).state_dict()), dict(plain.state_dict()))


def test_lightning_fabric() -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    plain = tiny.causal_model().double()
    model = copy.deepcopy(plain)
    prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    other = torch.optim.SGD(plain.parameters(), 0.1)
    with enable(prepared, chunk_size=5) as done:
        for step in range(3):
            for own, by, backward in ((prepared, optimizer, fabric.backward), (plain, other, Tensor.backward)):
                backward(own(**batch(step)).loss)
                by.step()
                by.zero_grad()
        assert list(prepared.state_dict()) == list(plain.state_dict())
    assert done.calls["model"].counts.compiled == 3
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("accumulated", [1, 3])
def test_lightnings_trainer(accumulated: int, tmp_path: Path) -> None:
    """It calls the model inside of its module, whose parameters it updates."""
    lightning: Any = pytest.importorskip("lightning")
    base: Any = lightning.LightningModule
    batches: Any = [batch(step) for step in range(3)]

    class Training(base):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(model: nn.Module) -> dict[str, Tensor]:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        how = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 1.0, "default_root_dir": tmp_path}
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **how, **quiet)
        trainer.fit(Training(model), torch.utils.data.DataLoader(batches, batch_size=None))
        return dict(model.state_dict())

    plain = tiny.causal_model().double()
    model = copy.deepcopy(plain)
    before = copy.deepcopy(plain.state_dict())
    with enable(model, chunk_size=5) as done:
        found = trained(model)
    assert done.calls["model"].counts.compiled == 3
    assert_close(found, trained(plain))
    assert any(not torch.equal(value, before[name]) for name, value in found.items())


def test_generation_runs_as_it_was() -> None:
    model: Any = tiny.causal_model().eval()
    prompt = batch(length=5)["input_ids"]
    wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with enable(model) as done:
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert done.calls["model"].counts.compiled == 0


def test_training_keeps_no_cache_and_evaluation_may() -> None:
    """`use_cache` is on by default: in training nobody reads the keys and values of every layer."""
    model = tiny.causal_model()
    with enable(model, chunk_size=5):
        assert model(**batch()).get("past_key_values") is None
        with torch.no_grad():
            assert model(**batch()).past_key_values is not None
        assert model(**batch(), use_cache=True).past_key_values is not None


def test_nothing_is_left_behind() -> None:
    model: Any = tiny.causal_model()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    before = {
        name: (module.__dict__.get("gradient_checkpointing"), len(module._forward_hooks))
        for name, module in model.named_modules()
    }
    done = enable(model, chunk_size=5)
    assert copy.deepcopy(model)._compiled_call_impl is None
    model(**batch()).loss.backward()
    after = {
        name: (module.__dict__.get("gradient_checkpointing"), len(module._forward_hooks))
        for name, module in model.named_modules()
    }
    done.disable()
    done.disable()
    assert before == after
    assert model._compiled_call_impl is None
    assert "off" in str(done)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """One process: buckets of a kilobyte would cut the graph after each parameter."""
    plain = tiny.causal_model().double()
    truth = gradients(plain, plain)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny.causal_model().double()
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with enable(wrapped, chunk_size=5):
            assert_close(gradients(model, wrapped), truth)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    finally:
        torch.distributed.destroy_process_group()


def test_wrapped_modules() -> None:
    model = tiny.causal_model()
    with enable(torch.nn.DataParallel(model)) as done:
        assert done.targets[0].module is model
