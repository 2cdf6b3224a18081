"""`streamfx.explain` reports how a step runs and changes nothing."""

import json
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import streamfx
from tests.support.layered import Block
from tests.support.small import WIDTH, Causal, Mixing, tokens

pytestmark = pytest.mark.compiled

IDS = tokens(2, 6)
CHUNKS = {"chunk_size": 4, "loss_chunk_size": 2}
KEYS = {"graphs", "graph_breaks", "break_reasons", "stages", "streamed_flops_share", "flops", "baseline_flops"}
STAGE_KEYS = {"name", "kind", "reason", "attention", "chunk_size", "loops", "saved_bytes", "source"}


class Broken(nn.Module):
    """Three layers with graph breaks between them; writes to a counter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.calls = 0
        self.count: Tensor = nn.Buffer(torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        self.calls += 1
        self.count += 1
        self.seen.append(self.calls)
        return x.square().mean()


class TokenNorm(nn.Module):
    """Normalizes over the sequence after one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Block(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.norm(x.softmax(dim=1)).square().mean()


def rows(length: int = 6) -> Tensor:
    return torch.randn(2, length, WIDTH)


def summary_of(model: Any, *args: Any, **more: Any) -> dict[str, Any]:
    return streamfx.explain(model, *args, **more).summary()


def test_a_streamed_decoder() -> None:
    explanation = streamfx.explain(Causal(), IDS, IDS, options=CHUNKS)
    summary, text = explanation.summary(), str(explanation)
    assert json.loads(json.dumps(summary)) == summary
    assert set(summary) >= {*KEYS, "peak_bytes", "baseline_peak_bytes"}
    assert all(set(stage) >= STAGE_KEYS for stage in summary["stages"])
    first, last = summary["stages"]
    assert (summary["graphs"], summary["graph_breaks"], summary["sequence"]) == (1, 0, [6])
    assert (first["kind"], last["kind"], first["reason"], first["attention"]) == ("streamed", "streamed", None, ["causal"])
    assert (first["chunk_size"], last["chunk_size"], last["name"]) == (4, 2, "head")
    assert any("scaled_dot_product_attention" in line for line in first["source"])
    assert all(stage["launches"] == sum(run["launches"] for run in stage["runs"]) > 0 for stage in summary["stages"])
    assert summary["streamed_flops_share"] == 1.0
    for part in ("every stage streams", "1 graph, no graph breaks, 6 rows", "in eager", "causal", "head"):
        assert part in text
    assert len(text.splitlines()) < 15


def test_strict_is_explained_not_raised() -> None:
    found = streamfx.explain(Mixing(), rows(), strict=True)
    assert found.stages[0].kind == "whole" and found.summary()["stages"][0]["attention"] == ["masked"]
    assert str(found).endswith("the backend raises NotStreamedError for these fallbacks")
    text = str(streamfx.explain(Mixing(), rows()))
    assert "fall back" in text and "strict" not in text + str(streamfx.explain(Causal(), IDS, IDS, strict=True))


@pytest.mark.parametrize("disabled", [False, True])  # `logging.config` disables loggers that exist
def test_graph_breaks_are_counted_and_all_graphs_are_analyzed(disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks"), "disabled", disabled)
    explanation = streamfx.explain(Broken(), rows())
    summary = explanation.summary()
    assert summary["graph_breaks"] == 1  # one place, three times
    assert "test_explain.py" in summary["break_reasons"][0]["where"]
    assert len(explanation.call.calls) == 3  # each layer, in two graphs: the input of the first needs no gradient
    assert [stage["attention"] for stage in summary["stages"]][:1] == [["causal"]]
    assert "graph break" in str(explanation)


def test_an_lstm_is_refused_with_advice() -> None:
    layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    with pytest.raises(streamfx.NotTracedError, match=r"(?s)test_explain.py:\d+: .*layer.*torch.nn.LSTMCell"):
        streamfx.explain(lambda x: layer(x)[0].square().mean(), rows())


def test_explain_changes_neither_model_nor_random_state() -> None:
    model = Broken()
    x = rows().requires_grad_()
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    versions = [parameter._version for parameter in model.parameters()]
    streamfx.explain(model, x).summary()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(parameter.grad is None for parameter in (*model.parameters(), x))
    assert (model.calls, model.seen) == (0, [])
    assert not any(isinstance(value, torch._subclasses.FakeTensor) for value in model.state_dict().values())
    assert "forward" not in vars(model.layers[0])


def test_compiled_code_of_other_backends_stays() -> None:
    """`explain` causes no recompilation and no dynamic sizes later."""
    model, sizes = Causal(), list[Any]()

    def backend(module: Any, inputs: Any) -> Any:
        sizes.append([size for value in inputs if value.dtype == torch.int64 for size in value.shape])
        return module

    compiled = torch.compile(model, backend=backend)
    compiled(IDS, IDS)
    streamfx.explain(model, tokens(2, 7), tokens(2, 7))
    compiled(IDS, IDS)
    torch.compile(Causal(), backend=backend)(tokens(2, 9), tokens(2, 9))
    assert len(sizes) == 2 and all(isinstance(size, int) for size in sizes[-1])


def test_reports_agree_for_meta_fake_and_compiled_models_and_for_dynamic_sizes() -> None:
    model, real = Causal(), summary_of(Causal(), IDS, IDS, options=CHUNKS)
    with torch.device("meta"):
        meta = Causal()
    with FakeTensorMode():
        fake, ids = Causal(), torch.zeros(2, 6, dtype=torch.int64)
        assert summary_of(fake, ids, ids, options=CHUNKS) == real
    compiled = torch.compile(model, backend="eager")
    for one, given in ((meta, IDS), (fake, ids), (compiled, IDS)):
        assert summary_of(one, given, given, options=CHUNKS) == real
    assert meta.embed.weight.is_meta
    torch._dynamo.mark_dynamic(dynamic := IDS.clone(), 1)
    torch._dynamo.mark_dynamic(labels := IDS.clone(), 1)
    found = summary_of(model, dynamic, labels, options=CHUNKS)
    assert (found["sequence"], found["flops"]) == ([6], real["flops"])
    assert found["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.05)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, ids: Tensor) -> Tensor:
        return 2 * self.model(ids, ids)  # type: ignore[no-any-return]


GLOBAL = Causal()


def test_models_that_a_callable_refers_to_get_no_gradients() -> None:
    model = Causal()
    decorated = (lambda step: lambda ids: 2 * step(ids))(lambda ids: model(ids, ids))
    for call in (Trainer(model).loss, partial(model, labels=IDS), decorated, lambda ids: GLOBAL(ids, ids)):
        assert summary_of(call, IDS)["baseline_peak_bytes"] > 0
        for parameter in (*model.parameters(), *GLOBAL.parameters()):
            assert parameter.grad is None and type(parameter) is nn.Parameter
