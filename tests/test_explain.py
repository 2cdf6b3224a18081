"""What `streamfx.explain` says, and that it leaves no mark."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import streamfx
from tests.support.small import WIDTH, Causal, Mixing, Streams, tokens

IDS = tokens(2, 6)
KEYS = {
    "graphs",
    "graph_breaks",
    "break_reasons",
    "stages",
    "streamed_flops_share",
    "peak_bytes",
    "baseline_peak_bytes",
    "flops",
    "baseline_flops",
}
STAGE_KEYS = {"name", "kind", "reason", "attention", "chunk_size", "loops", "saved_bytes", "source"}


class Broken(nn.Module):
    """Three layers with a graph break between them, and a counter and a buffer that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.calls = 0
        self.seen: list[int] = []
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        self.calls += 1
        self.count += 1
        self.seen.append(self.calls)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        mixed: Tensor = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return mixed


class TokenNorm(nn.Module):
    """Normalises over the sequence, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.norm(x.softmax(dim=1)).square().mean()


def rows(length: int = 6) -> Tensor:
    return torch.randn(2, length, WIDTH)


def summary_of(model: Any, *args: Any, **more: Any) -> dict[str, Any]:
    return streamfx.explain(model, *args, **more).summary()


def test_summary_is_complete_and_plain() -> None:
    summary = summary_of(Causal(), IDS, IDS, options={"chunk_size": 4, "loss_chunk_size": 2})
    assert set(summary) >= KEYS
    assert all(set(stage) >= STAGE_KEYS for stage in summary["stages"])
    assert json.loads(json.dumps(summary)) == summary


def test_streamed_decoder() -> None:
    summary = summary_of(Causal(), IDS, IDS, options={"chunk_size": 4, "loss_chunk_size": 2})
    first, last = summary["stages"]
    assert (summary["graphs"], summary["graph_breaks"], summary["sequence"]) == (1, 0, [6])
    assert [stage["kind"] for stage in (first, last)] == ["streamed", "streamed"]
    assert first["reason"] is None
    assert first["attention"] == ["causal"]
    assert (first["chunk_size"], last["chunk_size"]) == (4, 2)
    assert last["name"] == "head"
    assert any("scaled_dot_product_attention" in line for line in first["source"])
    assert summary["streamed_flops_share"] == 1.0


def test_windows_are_named() -> None:
    summary = summary_of(Streams(), torch.randn(9, WIDTH), torch.randn(9, WIDTH), options={"chunk_size": 4})
    assert [stage["attention"] for stage in summary["stages"]] == [["window(3)"], ["window(3)"]]


def test_attention_to_everything_is_masked() -> None:
    summary = summary_of(Mixing(), rows())
    assert summary["stages"][0]["attention"] == ["masked"]


def test_a_whole_stage_says_why() -> None:
    stage = summary_of(Mixing(), rows())["stages"][0]
    assert stage["kind"] == "whole"
    for part in ("aten.sort", "mixes the rows", "small.py", "torch.sort(self.up(x), dim=1)", "let it run along another"):
        assert part in stage["reason"]


def test_an_operator_that_mixes_rows_after_attention() -> None:
    (stage, *_) = (stage for stage in summary_of(TokenNorm(), rows())["stages"] if stage["kind"] == "whole")
    assert "aten._softmax.default" in stage["reason"]
    assert "test_explain.py" in stage["reason"]


@torch.library.custom_op("streamfx_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 2 * gradient)


class Custom(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(twice(x)).square().sum()


def test_an_unknown_operator_is_named_with_what_helps() -> None:
    reasons = [stage["reason"] for stage in summary_of(Custom(), rows())["stages"] if stage["reason"]]
    assert len(reasons) == 1
    assert "streamfx_tests.twice" in reasons[0]
    assert "streamfx.register_rule" in reasons[0] and "streamfx.register_recurrence" in reasons[0]


def test_a_graph_without_a_sequence_is_whole() -> None:
    (stage,) = summary_of(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True))["stages"]
    assert stage["kind"] == "whole"
    assert "no dimension of this graph" in stage["reason"]


def test_much_work_without_a_sequence_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A graph that nothing streams of says so when it is compiled, with what nothing is known of and the line of the code."""
    monkeypatch.setattr("streamfx.tools.report.no_gain_notice.MUCH_WORK", 1000)

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16))

        def forward(self) -> Tensor:
            return torch.linalg.matrix_exp(twice(self.w) @ self.w).sort(0).values.sum()

    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(Squared(), backend="streambp")().backward()
    (told,) = [record.getMessage() for record in caplog.records if "without streaming" in record.getMessage()]
    assert "e+0" in told
    assert "no rule for streamfx_tests.twice" in told
    assert "test_explain.py" in told
    assert "please report" not in told
    (stage,) = summary_of(Squared())["stages"]
    assert "no rule for streamfx_tests.twice" in stage["reason"]
    monkeypatch.setattr("streamfx.tools.report.no_gain_notice.MUCH_WORK", 10**9)
    caplog.clear()
    torch.compile(Squared(), backend="streambp")().backward()
    assert not caplog.records


@pytest.mark.parametrize("disabled", [False, True])  # as `logging.config` does with loggers that were there before
def test_graph_breaks_are_counted_and_all_pieces_analysed(disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks"), "disabled", disabled)
    explanation = streamfx.explain(Broken(), rows())
    summary = explanation.summary()
    assert summary["graph_breaks"] == 1  # one place, met three times
    assert "test_explain.py" in summary["break_reasons"][0]["where"]
    assert len(explanation.call.calls) == 3  # each layer, in two graphs: the first one's input needs no gradient
    assert [stage["attention"] for stage in summary["stages"]][:1] == [["causal"]]
    assert "graph break" in str(explanation)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer = Layer(), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.layer(x)[0].square().mean()


class Alone(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()


class WrittenOut(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        hidden = cell = x.new_zeros(x.shape[0], WIDTH)
        steps = []
        for row in range(x.shape[1]):
            hidden, cell = torch.lstm_cell(x[:, row], (hidden, cell), *self.layer.all_weights[0])  # as an LSTMCell
            steps.append(hidden)
        return torch.stack(steps, 1).square().mean()


def test_a_recurrent_layer_is_given_advice_that_helps() -> None:
    """Dynamo gives up a function with an LSTM; told to trace it, it gives steps that stream, as those of a loop over rows do."""
    text = str(streamfx.explain(Recurrent(), rows()))
    assert "every traced stage streams" in text
    assert "the rest of this function is not traced" in text
    assert "torch.nn.LSTMCell" in text
    with pytest.raises(streamfx.NotTracedError, match=r"(?s)test_explain.py:\d+: return self.layer.*torch.nn.LSTMCell"):
        streamfx.explain(Alone(), rows())
    with torch._dynamo.config.patch(allow_rnn=True):
        assert all(stage["kind"] == "streamed" for stage in summary_of(Recurrent(), rows())["stages"])
    assert all(stage["kind"] == "streamed" for stage in summary_of(WrittenOut(), rows())["stages"])


def test_a_break_is_named_with_its_cause() -> None:
    class Printing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            print(end="")
            return x.square().sum()

    (found,) = summary_of(Printing(), rows())["break_reasons"]
    assert found["reason"].startswith("Failed to trace builtin operator")
    assert "print" in found["reason"]
    assert 'print(end="")' in found["where"]
    assert "print" in found["do"]
    assert not found["given_up"]


def test_nothing_is_left_behind() -> None:
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


def test_compiled_code_of_others_stays() -> None:
    """Neither the number of recompilations nor dynamic sizes of later compilations are touched."""
    model, counts = Causal(), []

    def backend(module: Any, inputs: Any) -> Any:
        counts.append([tuple(value.shape) for value in inputs if value.dtype == torch.int64])
        return module

    compiled = torch.compile(model, backend=backend)
    compiled(IDS, IDS)
    for length in (5, 7, 8):
        streamfx.explain(model, tokens(2, length), tokens(2, length))
    compiled(IDS, IDS)
    assert len(counts) == 1
    fresh = torch.compile(Causal(), backend=backend)
    fresh(tokens(2, 9), tokens(2, 9))
    assert all(isinstance(size, int) for shape in counts[-1] for size in shape)


def test_fake_and_meta_models_need_no_data() -> None:
    real = summary_of(Causal(), IDS, IDS)
    with torch.device("meta"):
        meta = Causal()
    assert summary_of(meta, IDS, IDS) == real
    assert summary_of(meta, IDS.to("meta"), IDS.to("meta")) == real
    assert meta.embed.weight.is_meta
    with FakeTensorMode():
        fake, ids = Causal(), torch.zeros(2, 6, dtype=torch.int64)
        assert summary_of(fake, ids, ids) == real
    assert summary_of(fake, ids, ids) == real


def test_inference() -> None:
    with torch.no_grad():
        summary = summary_of(Causal().eval(), IDS, IDS)
    assert summary["stages"]
    assert all(stage["kind"] == "streamed" for stage in summary["stages"])
    assert summary["flops"] < summary_of(Causal(), IDS, IDS)["flops"] / 2


def test_frozen_and_tied_parameters() -> None:
    model = Causal()
    model.head.weight = model.embed.weight
    model.q.weight.requires_grad_(False)
    summary = summary_of(model, IDS, IDS)
    assert all(stage["kind"] == "streamed" for stage in summary["stages"])
    assert summary["flops"] < summary_of(Causal(), IDS, IDS)["flops"]


def test_functions_and_compiled_models() -> None:
    model = Causal()
    expected = summary_of(model, IDS, IDS)
    assert summary_of(torch.compile(model, backend="eager"), IDS, IDS) == expected
    assert summary_of(lambda ids: model(ids, ids), IDS)["flops"] == expected["flops"]


def test_strict_is_explained_not_raised() -> None:
    found = streamfx.explain(Mixing(), rows(), strict=True)
    assert found.stages[0].kind == "whole" and str(found).endswith("the backend raises NotStreamedError for what runs whole")
    assert "strict" not in str(streamfx.explain(Mixing(), rows())) + str(streamfx.explain(Causal(), IDS, IDS, strict=True))


def test_a_call_that_fails_is_an_error_with_the_cause() -> None:
    with pytest.raises(streamfx.NotTracedError, match=r"follow calls that torch\.compile can trace"):
        streamfx.explain(Causal(), IDS)


def test_options_are_checked() -> None:
    with pytest.raises(streamfx.OptionError, match="chunk_size"):
        streamfx.explain(Causal(), IDS, IDS, options={"chunk_sise": 3})


def test_report_is_one_page_in_plain_words() -> None:
    text = str(streamfx.explain(Causal(), IDS, IDS, options={"chunk_size": 4}))
    for part in ("every stage streams", "1 graph, no graph breaks, 6 rows", "in eager", "causal", "head"):
        assert part in text
    assert len(text.splitlines()) < 15
    assert "runs whole" in str(streamfx.explain(Mixing(), rows()))


def test_equal_layers_share_a_line() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    text = str(streamfx.explain(Stack(), rows().requires_grad_()))
    assert "layers.0-2" in text  # the last saves nothing, and has a line of its own


def test_dynamic_sizes_are_those_of_the_call() -> None:
    ids = tokens(2, 12)
    torch._dynamo.mark_dynamic(ids, 1)
    labels = tokens(2, 12)
    torch._dynamo.mark_dynamic(labels, 1)
    dynamic = summary_of(Causal(), ids, labels, options={"chunk_size": 4})
    static = summary_of(Causal(), tokens(2, 12), tokens(2, 12), options={"chunk_size": 4})
    assert (dynamic["sequence"], dynamic["flops"]) == ([12], static["flops"])
    assert dynamic["peak_bytes"] == pytest.approx(static["peak_bytes"], rel=0.05)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, ids)
        return loss


GLOBAL = Causal()


def test_models_behind_other_callables_are_left_alone() -> None:
    model = Causal()
    ways: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
        (model, Trainer(model).loss),
        (model, lambda ids: Trainer(model).loss(ids)),
        (model, partial(model, labels=IDS)),
        (model, (lambda step: lambda ids: 2 * step(ids))(lambda ids: model(ids, ids))),  # as a decorator wraps it
        (GLOBAL, lambda ids: GLOBAL(ids, ids)),
    ]
    for module, call in ways:
        explanation = streamfx.explain(call, IDS)
        assert explanation.summary()["baseline_peak_bytes"] > 0
        assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in module.parameters())
        assert not any(isinstance(parameter, torch._subclasses.FakeTensor) for parameter in module.parameters())
