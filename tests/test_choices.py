"""Every choice of the plan, forced: gradients stay those of eager."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from streamfx.cost.memory import cost_of
from streamfx.ir.facts import Facts, known
from streamfx.options import resolved
from tests.support import hf
from tests.support.exactness import TOLERANCE, compare, compare_replayed
from tests.support.hf import LossOf, deep
from tests.support.spread import only

LAYERS = 5
MODELS = [hf.qwen3_tied, pytest.param(hf.mistral, marks=pytest.mark.long)]
CHOICES: list[dict[str, Any]] = [
    {"keep_every": 1, "save": "attention"},
    {"keep_every": 2, "save": "inputs"},
    {"keep_every": 3, "save": "attention"},
    {"keep_every": 9, "save": "inputs"},
    {"save": "projections"},
    {"save": "products"},
    {"keep_every": 2, "save": "products"},
    {"offload": "inputs", "save": "inputs"},
    {"offload": "inputs", "keep_every": 2},
    {"offload": "attention", "keep_every": 2},
    {"offload": "attention"},
]


def loops_again(facts: Facts) -> int:
    assert facts.program is not None
    return sum("_again" in loop.spec.name for loop in facts.program.loops)


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_under_every_choice(make: Callable[..., nn.Module], pytestconfig: pytest.Config) -> None:
    ids = torch.randint(1, hf.VOCABULARY, (2, 19))
    report = compare(deep(make, LAYERS), {"input_ids": ids, "labels": ids}, chunk_size=6, keep_every=2)
    assert loops_again(report.facts[0]) == 2
    for choice in CHOICES if pytestconfig.getoption("--long") else CHOICES[::2]:
        compare_replayed(report.recorder, 5, TOLERANCE, choice)


@pytest.mark.long
def test_how_many_stages_run_again() -> None:
    ids = torch.randint(1, hf.VOCABULARY, (2, 19))
    (recorded,) = compare(deep(hf.llama, LAYERS), {"input_ids": ids, "labels": ids}, chunk_size=6).recorder.compilations
    facts = {every: recorded.facts_for(resolved({"keep_every": every, "outputs": "dense"})) for every in (1, 2, 3, 9)}
    assert [loops_again(facts[every]) for every in (1, 2, 3, 9)] == [0, 2, 3, 4]
    saved = [len(known(facts[every].program).saved) for every in (1, 2, 3, 9)]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] - saved[-1] == LAYERS - 1


LEVELS = ("inputs", "attention", "projections", "products")


@pytest.mark.parametrize("make", only([], [hf.gemma2, hf.gpt_neox]), ids=lambda make: make.__name__)
def test_gradients_at_every_level(make: Callable[..., nn.Module]) -> None:
    """Norms after products and attention spelled out; attention and MLP side by side, with biases."""
    ids = torch.randint(1, hf.VOCABULARY, (2, 11))
    report = compare(deep(make, 2), {"input_ids": ids, "labels": ids}, chunk_size=4, save="projections")
    for save in ("attention", "products"):
        compare_replayed(report.recorder, 3, TOLERANCE, {"save": save})


def test_what_each_level_keeps() -> None:
    """Values of the first layer, batch 1: each level keeps what the one before it keeps, and computes less again."""
    ids = torch.randint(1, hf.VOCABULARY, (1, 12))
    model = LossOf(deep(hf.qwen3, 2))
    (recorded,) = compare(model, {"input_ids": ids, "labels": ids}, chunk_size=6).recorder.compilations
    facts = [recorded.facts_for(resolved({"save": save, "chunk_size": 6, "loss_chunk_size": 6})) for save in LEVELS]
    kept = [{node.name: tuple(node.meta["val"].shape) for node in own.plan.kept[0]} for own in facts]
    assert all(less.items() < more.items() for less, more in pairwise(kept))
    shapes = [sorted(more[name] for name in more.keys() - less.keys()) for less, more in pairwise(kept)]
    keys, queries, inner = hf.KEY_HEADS * hf.HEAD, hf.HEADS * hf.HEAD, hf.ROTARY["intermediate_size"]
    assert shapes[0] == [(1, hf.HEADS, 12), (1, hf.HEADS, 12, hf.HEAD)]
    assert shapes[1] == sorted([(12, keys), (12, keys), (12, queries), (1, 12, hf.WIDTH)])
    assert shapes[2] == [(12, inner), (12, inner)]
    costs = [cost_of(own.program.forward, own.program.backward, 1) for own in facts if own.program is not None]
    assert all(less.flops > more.flops and less.held < more.held for less, more in pairwise(costs))
