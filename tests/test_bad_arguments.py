"""No public function can be held wrong: what it cannot be called with is refused by one error, before anything is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
    RuleError,
)
from tests.support.small import Causal, tokens
from tests.support.stateful.averages import averages

IDS = tokens(2, 12)
BY_NAME = r"takes options by name(?s:.*)options=.'chunk_size': 1024., or the options by their names"
MM = torch.ops.aten.mm.default
ANY: Any = streamfx  # called as no type checker would let it be


class Swallowing(Causal):
    def forward(self, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
        return super().forward(ids, labels)


class Own(nn.Linear):
    """A model of somebody's own, on the meta device."""

    def __init__(self) -> None:
        super().__init__(4, 4, device="meta")


def step() -> Any:
    return streamfx.explain(lambda ids: Causal()(ids, ids), IDS)


WRONG: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "a list of modules": (IntegrationError, "a ModuleList that has no forward", lambda: ANY.enable(nn.ModuleList([Causal()]))),
    "modules by name": (IntegrationError, "a ModuleDict that has no forward", lambda: ANY.enable(nn.ModuleDict({"a": Causal()}))),
    "a module of nothing": (IntegrationError, "a Module that has no forward", lambda: ANY.enable(nn.Module())),
    "no model": (IntegrationError, "missing a required argument: 'trainer_or_model'", lambda: ANY.enable()),
    "two models": (IntegrationError, "too many positional arguments", lambda: ANY.enable(Causal(), Causal())),
    "disable of a text": (
        IntegrationError,
        "(?s)disable takes a module.*a str without .model",
        lambda: ANY.disable("x"),
    ),
    "disable of nothing": (IntegrationError, r"streamfx.disable\(", lambda: ANY.disable()),
    "enable, a mapping": (OptionError, BY_NAME, lambda: ANY.enable(Causal(), {"chunk_size": 4})),
    "enable, Options": (OptionError, BY_NAME, lambda: ANY.enable(Causal(), Options())),
    "configure, a mapping": (OptionError, BY_NAME, lambda: ANY.configure({"chunk_size": 4})),
    "configure, Options": (OptionError, BY_NAME, lambda: ANY.configure(Options())),
    "configure, a number": (OptionError, "too many positional arguments", lambda: ANY.configure(4)),
    "plan, a mapping": (OptionError, BY_NAME, lambda: ANY.plan("Qwen3-8B", {"chunk_size": 4})),
    "explain, Options": (OptionError, BY_NAME, lambda: ANY.explain(Causal(), IDS, IDS, Options())),
    "verify, Options": (OptionError, BY_NAME, lambda: ANY.verify(Causal(), IDS, IDS, Options())),
    "Options, a mapping": (OptionError, BY_NAME, lambda: ANY.Options({"chunk_size": 4})),
    "Options, a number": (OptionError, "too many positional arguments", lambda: ANY.Options(16)),
    "Options, misspelt": (OptionError, "no option 'chunk'(?s:.*)did you mean 'chunk_size'", lambda: ANY.Options(chunk=16)),
    "True in quotes": (
        OptionError,
        "do +write True without quotes; allowed: 'auto', True, False",
        lambda: ANY.Options(reshard="True"),
    ),
    "nearly True": (OptionError, "do +did you mean True", lambda: ANY.Options(reshard="Tru")),
    "None for a word": (OptionError, "do +write 'none' in quotes; allowed: 'none'", lambda: ANY.Options(offload=None)),
    "None": (OptionError, "do +allowed: 'lazy', 'dense'", lambda: ANY.Options(outputs=None)),
    "explain, misspelt": (OptionError, "did you mean 'chunk_size'", lambda: ANY.explain(Causal(), IDS, IDS, chunksize=4)),
    "explain, swallowed": (OptionError, "did you mean 'chunk_size'", lambda: ANY.explain(Swallowing(), IDS, IDS, chunk_sise=4)),
    "verify, swallowed": (OptionError, "did you mean 'keep_every'", lambda: ANY.verify(Swallowing(), IDS, IDS, keep_evry=4)),
    "verify, unknown": (OptionError, "the model takes ids, labels", lambda: ANY.verify(Causal(), IDS, IDS, foo=4)),
    "explain of nothing": (NotTracedError, "missing a required argument: 'model'", lambda: ANY.explain()),
    "verify of nothing": (NotComparableError, "missing a required argument: 'model'", lambda: ANY.verify()),
    "profile of a model": (ProfileError, "it takes nothing", lambda: ANY.profile(Causal())),
    "a profile that was not entered": (ProfileError, "its block was not entered", lambda: ANY.profile().summary()),
    "its text": (ProfileError, "its block was not entered", lambda: str(ANY.profile())),
    "the backend of a model": (
        IntegrationError,
        "missing a required argument: 'example_inputs'\n +do +it is a backend: write torch.compile",
        lambda: ANY.streambp(nn.Linear(2, 2)),
    ),
    "the backend of nothing": (IntegrationError, "do +it is a backend: write torch.compile", lambda: ANY.streambp()),
    "the backend of a model and ids": (
        IntegrationError,
        "takes a graph that Dynamo has traced\n +found Linear(?s:.*)do +it is a backend: write torch.compile",
        lambda: ANY.streambp(nn.Linear(2, 2), [IDS]),
    ),
    "a rule of nothing": (RuleError, "missing a required argument: 'rule'", lambda: ANY.register_rule(MM)),
    "a recurrence of nothing": (RuleError, "missing a required argument: 'rows'", lambda: ANY.register_recurrence(MM, MM)),
    "no arguments": (RuleError, "missing a required argument: 'arguments'", lambda: ANY.check_recurrence(MM)),
    "plan of nothing": (PlanError, "missing a required argument: 'model'", lambda: ANY.plan()),
    "plan of a number": (PlanError, "an int is no configuration", lambda: ANY.plan(3)),
    "plan, a long name": (PlanError, "there is no configuration", lambda: ANY.plan("x" * 300)),
    "plan, no name": (PlanError, "there is no configuration", lambda: ANY.plan("a\0b")),
    "a type in a list": (PlanError, r"dtype cannot be \['x'\] \(list\)", lambda: ANY.plan("Qwen3-8B", dtype=["x"])),
    "a scheme in a set": (PlanError, "quantize cannot be", lambda: ANY.plan("Qwen3-8B", quantize={"nf4"})),
    "an optimizer": (PlanError, "optimizer cannot be the class AdamW", lambda: ANY.plan("Qwen3-8B", optimizer=torch.optim.AdamW)),
    "no objective": (PlanError, "objective cannot be", lambda: ANY.plan("Qwen3-8B", objective=[])),
    "noted": (PlanError, r"noted cannot be 3 \(int\)", lambda: ANY.plan("Qwen3-8B", noted=3)),
    "no rank": (PlanError, "lora_rank cannot be 0", lambda: ANY.plan("Qwen3-8B", lora_rank=0)),
    "baselines": (PlanError, "baselines cannot be 'no'(?s:.*)True or False", lambda: ANY.plan("Qwen3-8B", baselines="no")),
    "a group of none": (
        PlanError,
        r"group has no effect(?s:.*)found group=4, and the objective 'dpo'",
        lambda: ANY.plan("Qwen3-8B", objective="dpo", group=4),
    ),
    "a host that nothing waits on": (
        PlanError,
        r"host_memory has no effect(?s:.*)offload='none'(?s:.*)do +give offload='inputs'",
        lambda: ANY.plan("Qwen3-8B", host_memory="1TiB", memory="80G"),
    ),
    "two budgets": (PlanError, "said twice, differently", lambda: ANY.plan("Qwen3-8B", memory="80G", memory_budget="40G")),
    "a model without inputs": (PlanError, "called with input_ids and labels(?s:.*)give inputs=", lambda: ANY.plan(Own())),
    "inputs, a number": (PlanError, "inputs cannot be 3", lambda: ANY.plan(Own(), inputs=3)),
    "inputs that are a list": (PlanError, "a dictionary of tensors", lambda: ANY.plan(Own(), inputs=lambda b, t: [b])),
    "inputs of a length": (PlanError, "it raises TypeError", lambda: ANY.plan(Own(), inputs=lambda t: {})),
    "inputs of one length": (
        PlanError,
        r"the same sizes from inputs\(1, 4096\) and inputs\(1, 2048\): x of shape \(2, 8, 4\)(?s:.*)length that it is given",
        lambda: ANY.plan(Own(), inputs=lambda b, t: {"x": torch.empty(2, 8, 4, device="meta")}),
    ),
    "inputs of one batch": (
        PlanError,
        r"of a batch(?s:.*)from inputs\(3, 64\) and inputs\(4, 64\)",
        lambda: ANY.plan(Own(), seq=64, batch=3, inputs=lambda b, t: {"x": torch.empty(1, t, 4, device="meta")}),
    ),
    "inputs of one batch, searched": (
        PlanError,
        "the same sizes from inputs",
        lambda: ANY.plan(Own(), max_batch=True, memory="1G", inputs=lambda b, t: {"x": torch.empty(1, t, 4, device="meta")}),
    ),
    "inputs that are arrays": (
        PlanError,
        r"x=a ndarray(?s:.*)torch.as_tensor",
        lambda: ANY.plan(Own(), inputs=lambda b, t: {"x": np.zeros((b, t, 4), np.float32)}),
    ),
    "an array, explained": (
        NotTracedError,
        r"arrays of numpy: input \['input'\] of shape \(2, 8, 4\)(?s:.*)torch.as_tensor\(array\)",
        lambda: ANY.explain(nn.Linear(4, 4), input=np.zeros((2, 8, 4), np.float32)),
    ),
    "an array, verified": (
        NotComparableError,
        r"do +input \[0\] of shape \(2, 4\) is an array of numpy: give tensors",
        lambda: ANY.verify(nn.Linear(4, 4), np.zeros((2, 4), np.float32)),
    ),
    "a row without a batch, explained": (
        NotTracedError,
        r"do +input \[0\] of shape \(12,\), input \[1\] of shape \(12,\) has no dimension for the batch(?s:.*)tensor\[None\]",
        lambda: ANY.explain(Causal(), IDS[0], IDS[0]),
    ),
    "a row without a batch, verified": (
        NotComparableError,
        "has no dimension for the batch",
        lambda: ANY.verify(Causal(), IDS[0], IDS[0]),
    ),
    "no inputs": (PlanError, "a dictionary of tensors", lambda: ANY.plan(Own(), inputs=lambda b, t: {})),
    "a report nowhere": (streamfx.ReportError, "give the path of a file", lambda: step().to_html(3)),
    "a report too far": (streamfx.ReportError, "give another path", lambda: step().to_html("x" * 300)),
    "a report of no name": (streamfx.ReportError, "give another path", lambda: step().to_html("a\0b")),
    "code of a number": (streamfx.ReportError, "give it as a text", lambda: step().print_readable(3)),
}


@pytest.mark.parametrize(("error", "said", "call"), WRONG.values(), ids=WRONG)
def test_wrong_calls(error: type[Exception], said: str, call: Callable[[], Any]) -> None:
    before = streamfx.options.resolved()
    with pytest.raises(error, match=said) as caught:
        call()
    assert isinstance(caught.value, streamfx.StreamFXError)
    assert "takes self" not in str(caught.value)
    assert streamfx.options.resolved() == before


def test_what_a_model_names_or_gathers_is_the_models() -> None:
    assert streamfx.verify(Swallowing(), IDS, IDS, use_cache=False, position_ids=IDS).ok


def test_a_profile_measures_one_block() -> None:
    with streamfx.profile() as profile:
        torch.zeros(8)
    with pytest.raises(ProfileError, match="has measured one"), profile:
        pass


def test_a_bad_environment_is_said_where_the_backend_is_asked_for() -> None:
    code = """
import torch, streamfx
for ask in (lambda: torch.compile(torch.nn.Linear(2, 2), backend="streambp"), lambda: streamfx.configure(),
            lambda: streamfx.enable(torch.nn.Linear(2, 2))):
    try:
        ask()
    except streamfx.OptionError as error:
        print(error.asked)
"""
    environment = {**os.environ, "STREAMFX_OPTIONS": '{"chunk": 3}'}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the environment variable STREAMFX_OPTIONS has no option 'chunk'"] * 3


@pytest.mark.parametrize(
    ("given", "says"),
    [([], r"arguments=\[\]"), ({1: 2}, "1 among the arguments"), ({"k": torch.ones(1, 2, 3)}, "no count, v, decay")],
)
def test_arguments_that_are_none_are_refused(given: Any, says: str) -> None:
    with pytest.raises(streamfx.RuleError, match=says):
        streamfx.check_recurrence(averages, given)
