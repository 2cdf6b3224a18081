"""Parts of a model, each compiled alone: layers one by one, an MLP, a norm, the backbone, the head with its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.ir.facts import known
from streamfx.passes.analysis.axes import _feature_axes
from tests.support import decoders, hf
from tests.support.exactness import TOLERANCE, Recorder, assert_small, check_streamed, compare, errors, outcome, recorder

LENGTH = 19
Install = Callable[[nn.Module, Recorder], Any]


def check(model: nn.Module, inputs: Any, install: Install, length: int = LENGTH, graphs: int = 1) -> Recorder:
    """Compile parts of a copy, compare with the model, and ask that all of them stream along `length` rows."""
    model = model.double()
    truth = outcome(eager := copy.deepcopy(model), eager, inputs)
    own, backend = copy.deepcopy(model), recorder(chunk_size=7, loss_chunk_size=7)
    install(own, backend)
    assert_small(errors(outcome(own, own, inputs), truth), TOLERANCE, "compiled in parts")
    assert len(backend.compilations) == graphs
    check_streamed(backend.facts, True, None)
    assert {facts.axes.sequence.length for facts in backend.facts} == {length}  # type: ignore[union-attr]
    return backend


def tokens() -> dict[str, Tensor]:
    pytest.importorskip("transformers")
    ids = torch.randint(3, 23, (2, LENGTH))
    return {"input_ids": ids, "labels": ids}


def each(part: Callable[[nn.Module], nn.Module]) -> Install:
    """Compile a part of every layer."""

    def install(model: nn.Module, backend: Recorder) -> None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            part(layer).compile(backend=backend)

    return install


def backbone(model: nn.Module, backend: Recorder) -> None:
    model.model.compile(backend=backend)  # type: ignore[operator,union-attr]


PARTS: dict[str, Install] = {
    "layers": each(lambda layer: layer),
    "MLPs": each(lambda layer: layer.mlp),  # type: ignore[arg-type,return-value]
    "attentions": each(lambda layer: layer.self_attn),  # type: ignore[arg-type,return-value]
    "norms": each(lambda layer: layer.input_layernorm),  # type: ignore[arg-type,return-value]
    "backbone": backbone,
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_llama(part: str) -> None:
    check(hf.llama(), tokens(), PARTS[part])


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_parts_of_others(name: str, part: str) -> None:
    check(getattr(hf, name)(), tokens(), PARTS[part])


def test_layers_by_name() -> None:
    """As users write it: the entry point, no part of streamfx imported."""
    model, inputs = hf.qwen3().double(), tokens()
    truth = outcome(eager := copy.deepcopy(model), eager, inputs)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="streambp", options={"chunk_size": 7})
    assert_small(errors(outcome(model, model, inputs), truth), TOLERANCE, "layers by name")


class Head(nn.Module):
    """An embedding outside of the compiled part, the head and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 16), nn.Linear(16, 23)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.embed(input_ids), labels)


def test_head_and_loss() -> None:
    def install(model: nn.Module, backend: Recorder) -> None:
        model.loss = torch.compile(model.loss, backend=backend)  # type: ignore[arg-type,assignment]

    check(Head(), tokens(), install)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("shape", [(30, 16), (2, 30, 16), (30, 2, 16)], ids=str)
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    """No attention, no loss: every row is made alone, so any axis of rows will do, and the longest saves most."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    report = compare(Perceptron().double(), {"x": x}, also=(1, 30))
    assert report.facts[0].axes.sequence.length == 30  # type: ignore[union-attr]


def test_expert_with_its_weights_as_inputs() -> None:
    """Weights that come as views of one parameter are inputs like any other: only what the products hold tells rows apart."""

    def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 2, 12, 8))
            self.call: Callable[..., Tensor] = expert

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.call(x, *weights) for weights in self.weights.unbind(1))  # type: ignore[return-value]

    model, x = Experts().double(), torch.randn(29, 8, dtype=torch.float64, requires_grad=True)
    truth = outcome(model, model, {"x": x})
    own, backend = copy.deepcopy(model), recorder(chunk_size=7)
    own.call = torch.compile(expert, backend=backend)
    assert_small(errors(outcome(own, own, {"x": x}), truth), TOLERANCE, "experts")
    check_streamed(backend.facts, True, None)
    assert backend.facts[0].axes.sequence.length == 29  # type: ignore[union-attr]


class Broken(nn.Module):
    """A break after the positions, one before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoders.Plain()

    def forward(self, **inputs: Any) -> Any:
        positions = torch.arange(inputs["ids"].shape[1]) + 1
        torch._dynamo.graph_break()
        return self.inner(**inputs) * (positions.sum() / positions.sum())


def test_a_graph_of_positions_is_no_stage() -> None:
    """What a break leaves by itself and computes nothing is not reported as running whole."""
    ids = torch.randint(0, 17, (2, LENGTH))
    report = compare(Broken().double(), {"ids": ids, "labels": ids}, graphs=None)
    stages = streamfx.explain(Broken(), ids=ids, labels=ids).stages
    assert len(report.recorder.compilations) > 1
    assert stages and all(stage.kind == "streamed" for stage in stages)


class WithSinks(nn.Module):
    """Attention whose result is weighed by a sink per head, which is joined to the log-sum-exp of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.sinks = nn.Linear(8, 24, bias=False), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT).masked_fill(later, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        sinks = self.sinks.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
        share = (lse - torch.cat([lse, sinks], -1).logsumexp(-1, keepdim=True)).exp()
        return x + (scores.softmax(-1) @ v * share).transpose(1, 2).flatten(2)


def test_a_weight_repeated_for_each_row_is_no_width() -> None:
    """Else the rows that it is repeated for would be those of a weight, and there might be no sequence."""
    model, given = nn.Sequential(WithSinks(), WithSinks()), torch.randn(2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    backend = check(model, (given,), lambda own, backend: own.compile(backend=backend))
    (facts,) = backend.facts
    sequence = known(facts.axes.sequence)
    assert sequence.main not in _feature_axes(facts.joint, facts.axes)
