"""Every choice of the plan, forced: gradients stay those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streamfx.ir.facts import Facts
from streamfx.options import resolved
from tests.support import hf
from tests.support.exactness import TOLERANCE, compare, compare_replayed
from tests.support.hf import deep

LAYERS = 5
MODELS = [hf.qwen3_tied, hf.mistral]
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
]


def loops_again(facts: Facts) -> int:
    assert facts.program is not None
    return sum("_again" in loop.spec.name for loop in facts.program.loops)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_under_every_choice(make: Callable[..., nn.Module]) -> None:
    ids = torch.randint(1, hf.VOCABULARY, (2, 19))
    report = compare(deep(make, LAYERS), {"input_ids": ids, "labels": ids}, chunk_size=6, keep_every=2)
    assert loops_again(report.facts[0]) == 2
    for choice in CHOICES:
        compare_replayed(report.recorder, 5, TOLERANCE, choice)


def test_how_many_stages_run_again() -> None:
    ids = torch.randint(1, hf.VOCABULARY, (2, 19))
    (recorded,) = compare(deep(hf.llama, LAYERS), {"input_ids": ids, "labels": ids}, chunk_size=6).recorder.compilations
    facts = {every: recorded.facts_for(resolved({"keep_every": every, "outputs": "dense"})) for every in (1, 2, 3, 9)}
    assert [loops_again(facts[every]) for every in (1, 2, 3, 9)] == [0, 2, 3, 4]
    saved = [len(facts[every].program.saved) for every in (1, 2, 3, 9)]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] - saved[-1] == LAYERS - 1
