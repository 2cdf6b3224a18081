"""explain, verify, plan, the logged line and a step say the same of a model: they tell from one record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.budget import in_bytes
from tests.support.small import VOCABULARY, tokens
from tests.support.spread import spread

ROWS, WIDTH = 48, 8


Mix = Callable[[Tensor, Any], Tensor]


class Of(nn.Module):
    """Layers that mix rows in some way, or do not, between a table and a loss."""

    def __init__(self, mixes: Mix, loss: Mix) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mixes, self.loss = mixes, loss

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.mixes(x, layer)
        return self.loss(self.head(x), ids)


def entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def attended(x: Tensor, layer: nn.Linear, **how: Any) -> Tensor:
    rows = layer(x)[:, None]
    return F.scaled_dot_product_attention(rows, x[:, None], rows, **how)[:, 0]


def causal(x: Tensor, layer: nn.Linear) -> Tensor:
    return attended(x, layer, is_causal=True)


GIVEN = {"chunk_size": 16, "loss_chunk_size": 16}
CASES: dict[str, tuple[Mix, Mix, dict[str, Any]]] = {
    "made again": (causal, entropy, {"chunk_size": 16, "loss_chunk_size": 24, "save": "inputs"}),
    "sorted": (lambda x, layer: causal(x, layer).sort(1).values, entropy, GIVEN),
    "other order": (lambda x, layer: layer(x.flip(1)), entropy, GIVEN),
    "within a budget": (causal, entropy, {"memory_budget": "1G"}),
    "all keys": (attended, entropy, GIVEN),
    "a running sum": (lambda x, layer: layer(x).cumsum(1) / x.shape[1], entropy, GIVEN),
    "a norm over rows": (lambda x, layer: layer(x).softmax(1), entropy, GIVEN),
    "of the best": (causal, lambda logits, ids: logits.topk(3, dim=1).values.square().mean(), GIVEN),
    "dense": (causal, entropy, {**GIVEN, "outputs": "dense", "gradients": "stagewise"}),
}


@pytest.mark.parametrize("name", spread(CASES, 4))
def test_five_reports_say_the_same(name: str) -> None:
    mixes, loss, given = CASES[name]
    model, ids, options = Of(mixes, loss), tokens(2, ROWS), {**given, "bodies": "eager"}
    explained = streamfx.explain(model, ids, options=options)
    verified = streamfx.verify(model, ids, options=options)
    with torch.device("meta"):
        of_meta = Of(mixes, loss)
    planned = streamfx.plan(of_meta, seq=ROWS, batch=2, inputs=inputs, device="here", baselines=False, options=options)
    with streamfx.enable(model, options=options) as enabled:
        model(ids).backward()
        model.zero_grad()
        with streamfx.profile() as profile:
            model(ids).backward()
    (logged,) = enabled.compiled
    summary, stages = explained.summary(), [stage.as_dict() for stage in explained.stages]
    assert verified.ok and [record.plain for record in verified.records] == [stages]
    assert planned.prediction.stages == stages
    loops = {run["name"]: run for stage in stages for run in stage["runs"]}
    ran = {loop.name: loop for loop in profile.measured.loops}
    assert {key: loop.chunks for key, loop in ran.items()} == {key: run["chunks"] for key, run in loops.items()}
    if not loops:
        assert "nothing streams" in str(explained) and "nothing streams" in logged.text and "nothing streams" in str(planned)
        return
    (record,) = verified.records
    said = str(explained).splitlines()[1].strip().partition(";")[0]
    assert said == record.streams == planned.prediction.streams
    assert f"  ran: {said}, {record.rows}" in str(verified)
    assert f": {said}" in logged.text and f", {record.rows}, peak predicted {in_bytes(summary['peak_bytes'])}" in logged.text
    assert profile.predicted_peak_bytes == summary["peak_bytes"]
    held = sum(parameter.nbytes for parameter in of_meta.parameters()) + ids.nbytes
    assert planned.prediction.peak_bytes - held == summary["peak_bytes"]


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.empty(batch, length, dtype=torch.int64, device="meta")}
