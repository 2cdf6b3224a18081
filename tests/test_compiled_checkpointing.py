"""What a plan says of checkpointing that is compiled, against the graphs that AOTAutograd's partitioner makes of it."""

from __future__ import annotations

import pytest
import torch

from streamfx.kernels.device_kinds import supposed
from streamfx.tools.inspect.eager import checkpointed, eager_cost
from streamfx.tools.planner.devices import device_called
from streamfx.tools.planner.models import configuration, language_model, loss_of
from tests.support.compiled_checkpointing import compiled_cost

LENGTH = 2048


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen3-8B", "Llama-3.1-8B"])
def test_a_followed_step_costs_what_compiled_graphs_cost(name: str) -> None:
    """Plans follow checkpointing in eager, and fuse what lies between products: the same work within a few percent.

    The compiled graphs have a mask, of which eager's calls have a flag, so attention counts twice as many pairs there.
    """
    config = configuration(name)
    config.num_hidden_layers = 3
    step = loss_of(language_model(config, torch.bfloat16, "meta"))
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    card = device_called("H100")
    with supposed(card.kind):
        inputs = {"input_ids": ids, "labels": ids}
        compiled, followed = compiled_cost(step, inputs, checkpointed, None), eager_cost(step, inputs, checkpointed)
    assert compiled is not None and followed is not None
    hidden = compiled.work.attention_flops - followed.work.attention_flops
    work = compiled.work.without_hidden(hidden)
    assert 0 < hidden == pytest.approx(followed.work.attention_flops, rel=0.01)
    assert work.flops == pytest.approx(followed.work.flops, rel=0.02)
    assert work.fused == pytest.approx(followed.work.fused, rel=0.12)
    assert card.seconds(work.compiled) == pytest.approx(card.seconds(followed.work.compiled), rel=0.03)
