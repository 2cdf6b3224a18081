"""Public functions refuse wrong arguments with one kind of error, before they change anything."""

import runpy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import (
    IntegrationError,
    NotComparableError,
    NotTracedError,
    OptionError,
    Options,
    PlanError,
    ProfileError,
    ReportError,
    RuleError,
)
from tests.support.small import Causal, tokens
from tests.support.stateful.averages import averages
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled

IDS, ARRAY, MODULE = tokens(2, 12), np.zeros((2, 4), np.float32), nn.Linear(4, 4)
MM = torch.ops.aten.mm.default
ANY: Any = streamfx  # hides types from mypy
Refusal = tuple[type[Exception], str, Callable[[], Any]]


class Swallowing(Causal):
    def forward(self, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
        return super().forward(ids, labels)


def compiles(**given: Any) -> Any:
    return torch.compile(Causal(), backend="streambp", **given)(IDS, IDS)


TAKING_OPTIONS: dict[str, Callable[..., Any]] = {
    "enable": lambda *args, **given: ANY.enable(Causal(), *args, **given),
    "configure": ANY.configure,
    "plan": lambda *args, **given: ANY.plan("Qwen3-8B", *args, **given),
    "explain": lambda *args, **given: ANY.explain(Causal(), IDS, IDS, *args, **given),
    "verify": lambda *args, **given: ANY.verify(Causal(), IDS, IDS, *args, **given),
    "Options": ANY.Options,
}
TWICE = {"options": Options(chunk_size=4), "chunk_size": 5}
BY_NAME = r"takes options by name(?s:.*)options=.'chunk_size': 1024., or name each option"
OPTIONS: list[Refusal] = [
    *((OptionError, BY_NAME, partial(call, Options())) for call in TAKING_OPTIONS.values()),
    *((OptionError, BY_NAME, partial(TAKING_OPTIONS[name], {"save": 4})) for name in ("enable", "configure", "plan", "Options")),
    *((OptionError, "did you mean 'chunk_size'", partial(call, chunksize=4)) for call in TAKING_OPTIONS.values()),
    *((OptionError, "1 or more, or 'auto'", partial(call, chunk_size=0)) for call in TAKING_OPTIONS.values()),
    *((OptionError, rf"{name}\(.*'chunk_size' twice", partial(call, **TWICE)) for name, call in [*TAKING_OPTIONS.items()][:-1]),
    (OptionError, "too many positional arguments", lambda: ANY.configure(4)),
    (OptionError, "dynamic of .* cannot be 'yes'", lambda: ANY.enable(Causal(), dynamic="yes")),
    (OptionError, "must be a dictionary of options, or streamfx.Options", lambda: ANY.enable(Causal(), options=8)),
    (OptionError, "do +write 'none' in quotes; allowed: 'none'", lambda: ANY.Options(offload=None)),
    (OptionError, "do +allowed: 'lazy', 'dense'", lambda: ANY.Options(outputs=None)),
    (OptionError, "did you mean 'chunk_size'", lambda: ANY.explain(Swallowing(), IDS, IDS, chunk_sise=4)),
    (OptionError, "the model takes ids, labels", lambda: ANY.verify(Causal(), IDS, IDS, foo=4)),
    (OptionError, "did you mean 'seq'", lambda: ANY.plan("Qwen3-8B", sec=64)),
    (OptionError, "1 or more, or 'auto'", lambda: compiles(options={"chunk_size": True})),
    (OptionError, "allowed: 'inputs', 'attention'", lambda: compiles(options={"save": ["inputs"]})),
    (OptionError, "a text like '24GiB'", lambda: compiles(options={"memory_budget": "lots"})),
    (OptionError, "must be a dictionary", lambda: compiles(options=[8])),
    (OptionError, "has no mode 'max-autotune'", lambda: compiles(mode="max-autotune")),
]
MODELS: list[Refusal] = [
    (IntegrationError, "a ModuleList that has no forward", lambda: ANY.enable(nn.ModuleList([Causal()]))),
    (IntegrationError, "missing a required argument: 'trainer_or_model'", lambda: ANY.enable()),
    (IntegrationError, "too many positional arguments", lambda: ANY.enable(Causal(), Causal())),
    (IntegrationError, "a NoneType without .model", lambda: ANY.enable(None)),
    (IntegrationError, r"a class \(Causal\), not an instance", lambda: ANY.enable(Causal)),
    (IntegrationError, "a list without .model", lambda: ANY.enable([Causal()])),
    (IntegrationError, "a SimpleNamespace, whose .model is NoneType", lambda: ANY.enable(SimpleNamespace(model=None))),
    (IntegrationError, "already compiled", lambda: ANY.enable(torch.compile(Causal()))),
    (IntegrationError, "torch.jit", lambda: ANY.enable(torch.jit.script(nn.Linear(2, 2)))),
    (IntegrationError, "(?s)disable takes a module.*a str without .model", lambda: ANY.disable("x")),
    (IntegrationError, r"streamfx.disable\(", lambda: ANY.disable()),
    (IntegrationError, "missing a required argument: 'example_inputs'\n +do +it is a backend", lambda: ANY.streambp(Causal())),
    (IntegrationError, "do +it is a backend: write torch.compile", lambda: ANY.streambp()),
    (IntegrationError, "a graph that Dynamo has traced\n +found a Causal", lambda: ANY.streambp(Causal(), [IDS])),
    (NotTracedError, "missing a required argument: 'model'", lambda: ANY.explain()),
    (NotTracedError, r"input \['input'\] of shape \(2, 4\)(?s:.*)torch.as_tensor", lambda: ANY.explain(MODULE, input=ARRAY)),
    (NotTracedError, r"\[0\] of shape \(12,\), (?s:.*)no batch dimension", lambda: ANY.explain(Causal(), IDS[0], IDS[0])),
    (NotTracedError, r"trace calls that torch\.compile can trace", lambda: ANY.explain(Causal(), IDS)),
    (NotComparableError, "missing a required argument: 'model'", lambda: ANY.verify()),
    (NotComparableError, r"input \[0\] of shape \(2, 4\) is a numpy array", lambda: ANY.verify(MODULE, ARRAY)),
    (NotComparableError, "has no batch dimension", lambda: ANY.verify(Causal(), IDS[0], IDS[0])),
    (ProfileError, "it takes no arguments", lambda: ANY.profile(Causal())),
    (ProfileError, "its block was not entered", lambda: ANY.profile().summary()),
    (RuleError, "missing a required argument: 'rule'", lambda: ANY.register_rule(MM)),
    (RuleError, "missing a required (keyword-only )?argument: 'rows'", lambda: ANY.register_recurrence(MM, MM)),
    (RuleError, "missing a required argument: 'arguments'", lambda: ANY.check_recurrence(MM)),
    (RuleError, r"arguments=\[\]", lambda: ANY.check_recurrence(averages, [])),
    (RuleError, "1 among the arguments", lambda: ANY.check_recurrence(averages, {1: 2})),
    (RuleError, "no count, v, decay", lambda: ANY.check_recurrence(averages, {"k": torch.ones(1, 2, 3)})),
    (ReportError, "the path of", lambda: ANY.explain(MODULE, torch.ones(2, 4)).to_html(3)),
    (ReportError, "another", lambda: ANY.explain(MODULE, torch.ones(2, 4)).to_html("a\0b")),
    (ReportError, "give it as a string", lambda: ANY.explain(Causal(), IDS, IDS).print_readable(3)),
]


def of_one_length(b: int, t: int) -> dict[str, Tensor]:
    return {"x": torch.empty(2, 8, 4, device="meta")}


def of_one_batch(b: int, t: int) -> dict[str, Tensor]:
    return {"x": torch.empty(1, t, 4, device="meta")}


LINEAR = nn.Linear(4, 4, device="meta")
PLANS: dict[str, dict[str, Any]] = {
    "an int is not a configuration": {"model": 3},
    "there is no configuration": {"model": "x" * 300},
    "parameters with data": {"model": nn.Linear(2, 2)},
    "num_hidden_layers = 1,000,000": {"model": {**TINY, "num_hidden_layers": 1_000_000}},
    "num_attention_heads = -4": {"model": {**TINY, "num_attention_heads": -4, "num_key_value_heads": -4}},
    r"dtype cannot be \['x'\] \(list\)": {"dtype": ["x"]},
    "quantize cannot be": {"quantize": {"nf4"}},
    "optimizer cannot be the class AdamW": {"optimizer": torch.optim.AdamW},
    "objective cannot be": {"objective": []},
    "did you mean 'dpo'": {"objective": "DPO"},
    r"noted cannot be 3 \(int\)": {"noted": 3},
    "lora_rank cannot be 0": {"lora_rank": 0},
    "baselines cannot be 'no'(?s:.*)True or False": {"baselines": "no"},
    "seq cannot be '4096'": {"seq": "4096"},
    "batch cannot be 0": {"batch": np.int64(0)},
    "memory cannot be 'much'": {"memory": "much"},
    "memory and memory_budget contradict each other": {"memory": "80G", "memory_budget": "40G"},
    "max_length needs a limit of memory": {"max_length": True},
    "host_memory cannot be 'auto'": {"host_memory": "auto"},
    "host_memory has no effect(?s:.*)do +give offload='inputs'": {"host_memory": "1TiB", "memory": "80G"},
    "group has no effect(?s:.*)found group=4, and the objective 'dpo'": {"objective": "dpo", "group": 4},
    "no rates of a device 'abacus'": {"device": "abacus"},
    "one of sgd, adamw, adamw8bit": {"optimizer": "none", "optimizer_in_backward": True},
    "plan with ddp, zero2 or zero3": {"optimizer": "adamw", "optimizer_in_backward": True, "world": 8, "shard": "zero1"},
    "there is no sharding 'zero4'": {"world": 8, "shard": "zero4"},
    "zero3 needs several devices": {"world": 1, "shard": "zero3"},
    "a world of 8": {"world": 8, "context": 3},
    "4 heads": {"world": 16, "context": 16},
    "2 key heads": {"world": 8, "tensor": 4},
    "seq=4102": {"world": 4, "context": 4, "seq": 4102},
    "the objective 'dpo'": {"world": 4, "context": 4, "objective": "dpo"},
    "adapters": {"world": 8, "tensor": 2, "lora_rank": 4},
    "calls the model with input_ids and labels(?s:.*)give inputs=": {"model": LINEAR},
    "inputs cannot be {'ids': 3}": {"inputs": {"ids": 3}},
    "a dictionary of tensors": {"model": LINEAR, "inputs": lambda b, t: [b]},
    "it raises TypeError": {"model": LINEAR, "inputs": lambda t: {}},
    r"inputs\(1, 4096\) and inputs\(1, 2048\): x of shape \(2, 8, 4\)(?s:.*)follow its arguments": {
        "model": LINEAR,
        "inputs": of_one_length,
    },
    r"depend on its batch(?s:.*)inputs\(3, 64\) and inputs\(4, 64\)": {
        "model": LINEAR,
        "seq": 64,
        "batch": 3,
        "inputs": of_one_batch,
    },
    "the same sizes from inputs": {"model": LINEAR, "max_batch": True, "memory": "1G", "inputs": of_one_batch},
    r"x=a ndarray(?s:.*)torch.as_tensor": {"model": LINEAR, "inputs": lambda b, t: {"x": np.zeros((b, t, 4))}},
}
WRONG: list[Refusal] = [
    *OPTIONS,
    *MODELS,
    (PlanError, "missing a required argument: 'model'", ANY.plan),
    *((PlanError, message, partial(ANY.plan, **{"model": TINY, **given})) for message, given in PLANS.items()),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG)
def test_refusals(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    before = streamfx.options.resolve_options()
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, streamfx.StreamFXError)
    assert "takes self" not in str(caught.value)
    assert streamfx.options.resolve_options() == before


@pytest.mark.parametrize("function", [streamfx.explain, streamfx.verify])
def test_a_class_is_refused_before_it_changes(function: Callable[..., Any]) -> None:
    """torch.compile changes a class for good: no later object of it would compute anything."""

    class Own(nn.Linear):
        pass

    call = Own.__call__
    with pytest.raises(streamfx.StreamFXError, match=r"a class \(Own\), not an instance"):
        function(Own, torch.randn(2, 4))
    assert Own.__call__ is call


def test_keywords_of_the_model_go_to_the_model() -> None:
    """Also a keyword that is the name of an option."""

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Causal().double()

        def forward(self, ids: Tensor, save: float = 1.0) -> Tensor:
            return save * self.inner(ids, ids)

    assert streamfx.explain(Swallowing(), IDS, IDS, use_cache=False, position_ids=IDS).summary()["graphs"] == 1
    found = streamfx.verify(model := Saves(), IDS, save=2.0, chunk_size=6)
    assert found.ok and found.loss == pytest.approx(2 * model(IDS).item())


def test_a_bad_environment_is_refused_when_the_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(streamfx.options.ENVIRONMENT, '{"chunk": 3}')
    asks = lambda: runpy.run_path(str(streamfx.frontend.backend.__file__)), streamfx.configure, lambda: streamfx.enable(Causal())
    for ask in asks:  # torch.compile does the first with the name of a backend
        with pytest.raises(OptionError, match="the environment variable STREAMFX_OPTIONS has no option 'chunk'"):
            ask()
