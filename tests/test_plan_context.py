"""`streamfx plan --tensor T --context C`: sequences divided among ranks that swap rows for heads, layers cut among others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import streamfx
from streamfx.cost.workspaces import GRANULE
from streamfx.tools.planner.models import built

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SEQ, LAYERS, BYTES = 4096, 2, 2


def plan_of(**given: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"seq": SEQ, "baselines": False, "shard": "zero3", "options": {"save": "inputs"}, **given}
    return streamfx.plan(SMALL, **arguments).summary()


def exchanged(found: dict[str, Any]) -> int:
    return sum(found["wire"][half]["exchanges"]["bytes"] for half in ("forward", "backward"))


@pytest.mark.parametrize("context", [2, pytest.param(8, marks=pytest.mark.long)])
def test_each_rank_exchanges_its_rows_for_heads(context: int) -> None:
    """Queries and results, keys and values, and the gradients of all four; keys are repeated where ranks are more than they."""
    found = plan_of(world=8, context=context)
    keys = max(2, context)
    width = 8 * (2 * 8 + 2 * keys)  # numbers of a row
    once = SEQ // context * width * BYTES * (context - 1) // context
    assert exchanged(found) >= 2 * LAYERS * once and exchanged(found) % once == 0
    assert found["peak_by_term"]["inputs"] == 3 * 8 * SEQ // context


def test_what_lies_between_loops_has_terms_of_its_own() -> None:
    """At the peak of a long sequence, in the gradient of attention: it, its result, and what ranks have swapped."""
    seq, ranks, tables = 1 << 17, 8, 2
    options = {"save": "inputs", "chunk_size": 64, "loss_chunk_size": 64, "offload": "inputs", "keep_every": 1}
    found = plan_of(world=ranks, context=ranks, seq=seq, options=options)
    rows = seq // ranks * 8 * 8 * BYTES  # of all heads: queries, and as many bytes of keys and of values, which are repeated
    terms = found["peak_by_term"]
    assert terms["exchanged rows"] == 4 * rows  # queries, keys, values, the gradient of the result
    kernel = (8 + 1) * 4 * seq + 2 * GRANULE  # a sum of the queries' gradient in single precision, two numbers of a generator
    assert terms["whole attention"] == 4 * rows + 4 * seq + kernel  # the result with its log-sum-exps, three gradients
    assert terms["other"] <= tables * seq // ranks * 8 * BYTES + 1024  # cosines and sines of positions
    assert terms["stage inputs"] == seq // ranks * 64 * BYTES  # of one layer: the other is on the host
    assert found["peak_bytes"] == sum(terms.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"world": 8, "context": 3}, "a world of 8"),
        ({"world": 16, "context": 16}, "8 heads"),
        ({"world": 8, "tensor": 4}, "2 heads of keys"),
        ({"world": 8, "context": 8, "seq": 4100}, "seq=4100"),
        ({"world": 8, "context": 8, "objective": "dpo"}, "the objective 'dpo'"),
        ({"world": 8, "tensor": 2, "lora_rank": 4}, "adapters"),
        ({"host_memory": "auto"}, "host_memory cannot be 'auto'"),
    ],
)
def test_what_cannot_be_divided_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(streamfx.PlanError, match=said):
        streamfx.plan(SMALL, **given)


def test_models_are_left_alone_by_plans_that_cut_them() -> None:
    model: nn.Module = built(SMALL)
    before = [(type(module), set(module.__dict__), list(module._parameters.items())) for module in model.modules()]
    found = streamfx.plan(model, seq=SEQ, world=8, tensor=2, context=4, shard="zero3", baselines=False).summary()
    assert found["world"] == 8 and found["tensor"] == 2 and found["context"] == 4
    after = [(type(module), set(module.__dict__), list(module._parameters.items())) for module in model.modules()]
    assert all(one[:2] == other[:2] for one, other in zip(before, after, strict=True))
    assert [id(value) for one in before for _, value in one[2]] == [id(value) for one in after for _, value in one[2]]
