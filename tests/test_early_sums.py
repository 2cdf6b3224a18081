"""Reductions over forward values that backward needs before its first loop are computed by the forward loops."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import streamfx
from streamfx.passes.partition.hoisted_reductions import hoisted_reductions
from tests.support import decoders, layouts
from tests.support.exactness import compare

pytestmark = pytest.mark.compiled

LAYERS, BLOCK, VOCABULARY, BATCH = 2, 11, 23, 2


def xlstm() -> nn.Module:
    """A tiny xLSTM of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": LAYERS, "num_blocks": LAYERS, "use_cache": False}
    config = transformers.AutoConfig.for_model("xlstm", **sizes, num_heads=2, mode="train", chunk_size=BLOCK)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss may break the graph
    return model


def test_a_recurrent_layer_has_one_backward_loop() -> None:
    """The last step with a gradient reads one row of each value, and no extra loop recomputes them. Nor is the last
    product of a layer recomputed: FLOPs are at most those of checkpointing.
    """
    ids = layouts.tokens(VOCABULARY, BATCH, 4 * BLOCK, 0)
    model, batch = decoders.made(xlstm), {"input_ids": ids, "labels": ids}
    compare(model, batch, chunk_size=BLOCK, also=(1, 2 * BLOCK), tolerance=1e-11)
    found = streamfx.explain(model, **batch, chunk_size=BLOCK, loss_chunk_size=BLOCK).summary()
    assert [stage["loops"] for stage in found["stages"]] == [2] * LAYERS + [1]
    assert found["flops"] <= found["checkpointing_flops"]


class Scaled(torch.autograd.Function):
    """Sums over later rows scale its gradient, and a table of rows scales the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (given,), (x, weight) = gradients, ctx.saved_tensors
        total = (x.flip(1).cumsum(1).flip(1).sin() * x).sum(1, keepdim=True)
        entries = (x[..., 0].flatten() * 100).abs().long() % 512
        table = x.new_zeros(512, x.shape[-1]).index_add(0, entries, x.flatten(0, 1))
        return given * weight * total, (given * x).sum((0, 1)) * table.square().mean(0)


class Convolved(nn.Module):
    """A sequence of convolutions, and a loss with a running sum."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.embed, self.head, self.scaled = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), scaled
        self.weight = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 4) for _ in range(LAYERS + 1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = Scaled.apply(x, self.weight) if self.scaled else x
            x = x + layer(F.pad(x.mT, (3, 0))).mT.sin()
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(ids).cumsum(1).mean()


@pytest.mark.parametrize("scaled", [False, True])
def test_each_layer_is_a_stage_if_the_loss_has_a_running_sum(scaled: bool) -> None:
    """A cut at a running sum of losses is smaller than a cut between layers. No forward loop computes a
    reversed running sum over rows, and no value keeps a table that no loop waits for.
    """
    model = decoders.made(lambda: Convolved(scaled))
    ids = layouts.tokens(VOCABULARY, BATCH, 24, 0)
    compare(model, {"ids": ids, "labels": ids}, chunk_size=8, also=(1, 5))
    explained = streamfx.explain(model, ids, ids, chunk_size=8)
    (facts,) = (graph.facts for graph in explained.call.graphs)
    assert not any(hoisted_reductions(number, facts) for number in range(len(facts.stages)))
    loops = [stage["loops"] for stage in explained.summary()["stages"]]
    assert len(loops) > LAYERS + 1 and max(loops) <= 5, loops
