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

ROWS, WIDTH = 48, 8


class Of(nn.Module):
    """Two layers that mix rows in some way, or none, between a table and a loss."""

    def __init__(self, mixes: Callable[[Tensor, Any], Tensor], loss: Callable[[Tensor, Tensor], Tensor], layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.mixes, self.loss = mixes, loss

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.mixes(x, layer)
        return self.loss(self.head(x), ids)


def of(mixes: str = "causal", loss: str = "") -> Callable[[], Of]:
    return lambda: Of(MIXES[mixes], LOSSES.get(loss, entropy))


def entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def attended(x: Tensor, layer: nn.Linear, **how: Any) -> Tensor:
    rows = layer(x)[:, None]
    return F.scaled_dot_product_attention(rows, x[:, None], rows, **how)[:, 0]


def windowed(x: Tensor, layer: nn.Linear) -> Tensor:
    at = torch.arange(x.shape[1])
    return attended(x, layer, attn_mask=(at <= at[:, None]) & (at > at[:, None] - 8))


def spelled(x: Tensor, layer: nn.Linear) -> Tensor:
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (layer(x) @ x.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ x


def convolved(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.conv1d(F.pad(x.mT, (2, 0)), layer.weight[:, :, None].expand(-1, -1, 3)).mT


MIXES: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "rows alone": lambda x, layer: layer(x).tanh(),
    "causal": lambda x, layer: attended(x, layer, is_causal=True),
    "all keys": attended,
    "a window": windowed,
    "spelled out": spelled,
    "a running sum": lambda x, layer: layer(x).cumsum(1) / x.shape[1],
    "a convolution": convolved,
    "a mean of rows": lambda x, layer: layer(x.mean(1, keepdim=True)),
    "sorted": lambda x, layer: attended(x, layer, is_causal=True).sort(1).values,
    "other order": lambda x, layer: layer(x.flip(1)),
    "rows by number": lambda x, layer: layer(x)[:, torch.tensor([2, 0, 1]).repeat(x.shape[1] // 3)],
    "a norm over rows": lambda x, layer: layer(x).softmax(1),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last row": lambda logits, ids: entropy(logits[:, -2:], ids[:, -2:]),
    "with a penalty": lambda logits, ids: entropy(logits, ids) + logits.logsumexp(-1).square().mean(),
    "of the best": lambda logits, ids: logits.topk(3, dim=1).values.square().mean(),
}
MODELS: dict[str, Callable[[], Of]] = {
    **{name: of(mixes=name) for name in MIXES},
    **{name: of(loss=name) for name in LOSSES},
}
ASKED: dict[str, dict[str, Any]] = {
    **{name: {"chunk_size": 16, "loss_chunk_size": 16} for name in MODELS},
    "made again": {"chunk_size": 16, "loss_chunk_size": 24, "save": "inputs"},
    "all kept": {"chunk_size": 24, "loss_chunk_size": 24, "save": "products"},
    "every second": {"chunk_size": 16, "loss_chunk_size": 16, "keep_every": 2},
    "dense": {"chunk_size": 16, "loss_chunk_size": 16, "outputs": "dense", "gradients": "stagewise"},
    "within a budget": {"memory_budget": "1G"},
}


@pytest.mark.parametrize("name", ASKED)
def test_five_reports_say_the_same(name: str) -> None:
    made, options = MODELS.get(name, MODELS["causal"]), {**ASKED[name], "bodies": "eager"}
    model, ids = made(), tokens(2, ROWS)
    explained = streamfx.explain(model, ids, options=options)
    verified = streamfx.verify(model, ids, options=options)
    with torch.device("meta"):
        of_meta = made()
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
    assert planned.prediction.peak_bytes - held(of_meta, ids) == summary["peak_bytes"]


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.empty(batch, length, dtype=torch.int64, device="meta")}


def held(model: nn.Module, ids: Tensor) -> int:
    return sum(parameter.nbytes for parameter in model.parameters()) + ids.nbytes


@pytest.mark.long
def test_a_refusal_of_a_plan_names_what_would_make_it_fit() -> None:
    """Where inputs of stages wait on the host, a step takes less than any that keeps them on the device."""
    with torch.device("meta"):
        model = Of(MIXES["causal"], entropy, layers=12)
    options = {"chunk_size": 64, "loss_chunk_size": 64, "save": "inputs", "keep_every": 1, "bodies": "eager"}

    def planned(memory: int | None = None, **more: Any) -> Any:
        own = {**options, **more}
        return streamfx.plan(model, seq=1024, inputs=inputs, device="here", baselines=False, memory=memory, options=own)

    on_host, here = (planned(offload=where).prediction.peak_bytes for where in ("inputs", "none"))
    limit = (on_host + here) // 2
    with pytest.raises(
        streamfx.OverBudgetError, match=r"(?s)less than any plan.*do    let inputs of stages wait on the host \(--offload"
    ):
        planned(limit)
    fits = planned(limit, offload="inputs")
    assert fits.summary()["fits"] and "wait there for the backward half" in str(fits)
    assert "are not counted" in str(fits) and "reserve  " in str(fits)
    with pytest.raises(streamfx.OverBudgetError) as hopeless:
        planned(1000)
    assert "wait on the host" not in hopeless.value.do
