"""Predicted peaks: every way of running a step holds its gradients at the end, and takes what a run of it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.cost.meter import Meter
from streamfx.cost.work import Work
from streamfx.torch_private import FakeTensorMode
from tests.support.spread import only

VOCABULARY, WIDTH = 50, 32
OPTIONS: list[dict[str, Any]] = [{}, {"save": "inputs", "chunk_size": 128}]
LENGTHS = (5, 400)  # gradients are most of what is alive, and least


class Layer(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        made: Tensor = x + self.down(F.gelu(self.up(x)))
        return made


def _embedded(model: Decoder, ids: Tensor) -> Tensor:
    made: Tensor = model.embed(ids)
    return made


outside: Callable[[Decoder, Tensor], Tensor] = torch._dynamo.disable(_embedded)  # of all graphs


class Decoder(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer(breaks=kind == "graph breaks") for _ in range(3))
        if kind == "tied":
            self.head.weight = self.embed.weight
        elif kind == "frozen":
            self.requires_grad_(False)
            self.layers[1].requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        x = outside(self, ids) if self.kind == "graph breaks" else self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def held(model: nn.Module, trained: bool = False) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad or not trained)


def tokens(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length))


@pytest.mark.parametrize("kind", only(["tied", "graph breaks"], ["tied", "frozen", "graph breaks"]))
def test_every_way_holds_its_gradients(kind: str) -> None:
    model = Decoder(kind)
    for length, chunk in zip(LENGTHS, (16, 100), strict=True):
        torch._dynamo.reset()
        summary = streamfx.explain(model, tokens(length), options={"chunk_size": chunk}).summary()
        for name in ("peak_bytes", "baseline_peak_bytes", "checkpointing_peak_bytes"):
            assert summary[name] >= held(model, trained=True), (name, length)


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("options", only(OPTIONS[1:], OPTIONS), ids=str)
def test_every_way_of_a_plan_holds_parameters_and_gradients(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Decoder()
    for length in LENGTHS:
        report = streamfx.plan(
            model, seq=length, inputs=lambda batch, length: {"ids": tokens(length).to("meta")}, options=options
        )
        found = report.summary()
        peaks = {"streambp": found["peak_bytes"], **{name: way["peak_bytes"] for name, way in found["ways"].items()}}
        assert set(peaks) == {"streambp", "eager", "gradient checkpointing"}
        assert all(peak >= held(model) + held(model, trained=True) for peak in peaks.values()), (length, peaks)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_predicted_is_what_a_run_takes(length: int) -> None:
    model, ids = Decoder(), tokens(length)
    summary = streamfx.explain(model, ids).summary()
    for name in ("baseline_peak_bytes", "checkpointing_peak_bytes"):
        model.zero_grad()
        with Meter() as meter:
            model(ids).backward()
        assert summary[name] == meter.peak, name
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.parametrize("bodies", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_is_predicted_is_what_the_allocator_gives(bodies: str) -> None:
    """Within 5 %, whoever runs the bodies: Inductor fuses operators, but has buffers of its own."""
    model, ids = Decoder(), tokens(1024)
    options: dict[str, Any] = {"bodies": bodies, "chunk_size": 128, "loss_chunk_size": 128}
    torch._dynamo.reset()
    predicted = streamfx.explain(model, ids, options=options).summary()["peak_bytes"]
    compiled = torch.compile(model, backend="streambp", options=options)
    compiled(ids).backward()
    model.zero_grad()
    assert predicted == pytest.approx(peak_live_bytes(lambda: compiled(ids).backward()), rel=0.05)


def test_gradients_of_an_earlier_step_change_nothing() -> None:
    model, ids = Decoder(), tokens(40)
    first = streamfx.explain(model, ids).summary()
    model(ids).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert streamfx.explain(model, ids).summary() == first
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))


def test_a_question_for_a_device_is_no_work() -> None:
    """Autograd asks more often where nodes of another graph's parameters are still there."""
    with FakeTensorMode(), Meter() as meter:
        made = torch.ones(8, 8)
        before = meter.work
        assert torch.ops.prim.device.default(made) == torch.device("cpu")
        assert meter.work == before != Work()
