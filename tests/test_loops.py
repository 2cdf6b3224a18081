"""`streamfx.enable` in loops that people write themselves: PEFT, accelerate, Lightning, generation."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import streamfx
from streamfx.integrations import enable
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.trainers import tiny

pytestmark = pytest.mark.compiled


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT, which ignores an old torchao."""
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


KINDS: dict[str, tuple[str, dict[str, Any]]] = named_cases("adapters", globals())


def adapted(peft: Any, kind: str) -> Any:
    name, given = KINDS[kind]
    return peft.get_peft_model(tiny.causal_model(), getattr(peft, name)(task_type="CAUSAL_LM", **given)).double()


@pytest.mark.parametrize("kind", only(["lora"], KINDS))
def test_adapters_are_exact(kind: str, peft: Any) -> None:
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
def test_dora_weights_are_one_graph_while_a_model_is_enabled(peft: Any) -> None:
    """peft asks in each layer whether a weight is quantized, in a way that Dynamo does not trace."""
    asks = vars(importlib.import_module("peft.tuners.lora.dora"))
    model, before = adapted(peft, "dora"), asks["dequantize_module_weight"]
    truth = gradients(model, model)
    torch._dynamo.reset()
    with enable(model, chunk_size=5) as done, enable(tiny.causal_model()):
        assert_close(gradients(model, model), truth)
        assert len(done.compiled) == 1, done
    assert asks["dequantize_module_weight"] is before


def test_generation_is_unchanged_and_training_keeps_no_cache() -> None:
    """`use_cache` is on by default, although training does not read keys and values of every layer."""
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


def test_disabling_restores_the_model() -> None:
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
