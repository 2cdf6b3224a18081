"""What `streamfx.verify` measures, and that it leaves no mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.kernels import accumulate
from streamfx.runtime import buffers
from streamfx.tools.inspect.chunk_override import NOT_CUT, ONE_CHUNK
from streamfx.tools.inspect.verify import default_loss, relative_difference
from tests.support.small import EXAMPLES, WIDTH, Causal, Streams, tokens

IDS = tokens(2, 6)


def test_a_streamed_decoder_is_the_same() -> None:
    model = Causal().double()
    result = streamfx.verify(model, IDS, IDS, options={"chunk_size": 2, "outputs": "dense"})
    assert result.ok
    assert result.max_error < 1e-14
    assert result.tolerance == 1e-12
    assert set(result.errors) == {name for name, _ in model.named_parameters()}
    assert result.loss == pytest.approx(result.streamed_loss, rel=1e-14)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples(example: str) -> None:
    model, arguments = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    assert streamfx.verify(model, *arguments, options={"chunk_size": 2, "outputs": "dense"}).ok


def test_float_inputs_that_require_gradients_are_compared() -> None:
    x, y = torch.randn(5, WIDTH, requires_grad=True), torch.randn(5, WIDTH)
    result = streamfx.verify(Streams(), x, y=y, options={"outputs": "dense"})
    assert set(result.errors) == {"w", "input [0]"}
    assert x.grad is None


def with_first(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object]) -> streamfx.Verification:
    """What is found where the first number of each weight's gradient is changed."""
    right = accumulate.add_product

    def wrong(total: Tensor, left: Tensor, right_: Tensor, is_first: bool) -> None:
        right(total, left, right_, is_first)
        change(total[0, 0])

    monkeypatch.setattr(accumulate, "add_product", wrong)
    return streamfx.verify(Causal(), IDS, IDS, options={"chunk_size": 4, "outputs": "dense"})


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    result = with_first(monkeypatch, lambda first: first.add_(0.125))
    assert not result.ok
    assert "NOT the same as eager" in str(result)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_differs(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    """However small the loss's own difference is."""
    result = with_first(monkeypatch, lambda first: first.fill_(number))
    assert not result.ok
    assert result.max_error == float("inf")


def test_what_is_no_number_in_eager_either_is_the_same() -> None:
    some = torch.tensor([1.0, float("nan"), float("inf")])
    assert relative_difference(some, some, 0.0) == 0
    assert relative_difference(torch.tensor([1.0, 2.0, float("inf")]), some, 0.0) == float("inf")


def test_what_chunks_hand_on_is_seen_unless_a_size_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows would be one chunk: then it is one that says so."""
    model, ids = Causal().double(), tokens(2, 12)
    assert ONE_CHUNK not in (said := str(streamfx.verify(model, ids, ids, outputs="dense"))) and "nothing was cut" not in said
    at_once = streamfx.verify(model, ids, ids, outputs="dense", chunk_size=12)
    assert at_once.ok and ONE_CHUNK in str(at_once)

    def forgetful(visible: Tensor, own: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
        """Keys of earlier chunks are lost."""
        visible.zero_()
        own.copy_(value.reshape(own.shape))
        return visible.reshape(shape)

    monkeypatch.setattr(buffers, "append", forgetful)
    assert streamfx.verify(model, ids, ids, outputs="dense", chunk_size=12).ok
    assert not streamfx.verify(model, ids, ids, outputs="dense").ok


def test_a_model_that_does_not_stream_says_little() -> None:
    """So does a step that fits into its budget as it stands."""
    found = streamfx.verify(Causal().double(), IDS, IDS, memory_budget="8GiB")
    assert found.ok and NOT_CUT in str(found)


def test_where_nothing_is_compiled_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(streamfx.NotComparableError, match="is switched off"):
        streamfx.verify(Causal(), IDS, IDS)


def test_what_is_not_traced_is_not_compared() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Causal()

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            return torch.compiler.disable(self.inner)(ids, labels)

    with pytest.raises(streamfx.NotComparableError, match="no graph of it arrives"):
        streamfx.verify(Apart(), IDS, IDS)


def test_eager_is_a_function_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Causal().double()
    function = torch.compile(lambda ids, labels: model(ids, labels), backend="streambp")
    monkeypatch.setattr(
        accumulate, "add", lambda total, part, is_first: (total.zero_() if is_first else total).add_(part, alpha=2)
    )
    assert not streamfx.verify(function, IDS, IDS, outputs="dense").ok
    monkeypatch.undo()
    found = streamfx.explain(function, IDS, IDS, outputs="dense").summary()
    assert found == streamfx.explain(model, IDS, IDS, outputs="dense").summary()


@pytest.mark.parametrize("how", ["enabled", "compiled", "a part that is compiled"])
def test_eager_is_the_model_as_it_was_written(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with is not the backend once more, where a model was enabled before, and its calls are not counted."""
    model = Causal().double()
    enabled = streamfx.enable(model, outputs="dense") if how == "enabled" else None
    part = model if how == "compiled" else next(module for module in model.modules() if isinstance(module, nn.Linear))
    if enabled is None:
        part.compile(backend="streambp")
    before = str(enabled)
    assert streamfx.verify(model, IDS, IDS, outputs="dense").ok
    found = streamfx.explain(model, IDS, IDS, outputs="dense").summary()
    assert found == streamfx.explain(Causal().double(), IDS, IDS, outputs="dense").summary()
    assert str(enabled) == before
    monkeypatch.setattr(
        accumulate, "add", lambda total, part, is_first: (total.zero_() if is_first else total).add_(part, alpha=2)
    )
    torch._dynamo.reset()
    assert not streamfx.verify(model, IDS, IDS, outputs="dense").ok
    assert (part._compiled_call_impl if enabled is None else model._compiled_call_impl) is not None


def test_the_table_shows_the_worst_first() -> None:
    text = str(streamfx.verify(Causal(), IDS, IDS, options={"chunk_size": 4, "outputs": "dense"}))
    for part in ("the same as eager", "tolerance 1e-04 (float32)", "head.weight", "norm in eager"):
        assert part in text
    assert len(text.splitlines()) < 12


class Counting(nn.Module):
    """Writes to buffers and attributes, as models with statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x).square().sum(-1).tanh().mean()


def test_nothing_is_left_behind() -> None:
    model, x = Counting(), torch.randn(6, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert streamfx.verify(model, x, options={"outputs": "dense"}).ok
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is not None and bool((parameter.grad == 3).all()) for parameter in model.parameters())
    assert model.calls == 0


def test_loss_picks_the_number() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Causal()

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            return {"hidden": self.inner.embed(ids), "loss": self.inner(ids, ids)}

    by_default = streamfx.verify(TwoOutputs(), IDS, options={"outputs": "dense"})
    assert by_default.norms["inner.q.weight"] > 0
    chosen = streamfx.verify(TwoOutputs(), IDS, loss=lambda out: out["hidden"].sum(), options={"outputs": "dense"})
    assert chosen.norms["inner.q.weight"] == 0
    assert chosen.ok


def test_without_a_loss_outputs_are_combined() -> None:
    output = (torch.ones(3, 2), torch.tensor([1, 2]))
    assert default_loss(output).dim() == 0
    assert default_loss({"loss": torch.tensor(2.0), "more": torch.ones(3)}) == 2
    assert default_loss(torch.ones(4)) != default_loss(-torch.ones(4))


def test_random_models_cannot_be_compared() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    with pytest.raises(streamfx.NotComparableError, match="draws random numbers"):
        streamfx.verify(model, torch.randn(3, WIDTH))
    assert streamfx.verify(model.eval(), torch.randn(3, WIDTH), options={"outputs": "dense"}).ok


def test_errors_say_what_to_do() -> None:
    with pytest.raises(streamfx.NotComparableError, match="holds no data"):
        streamfx.verify(Causal(), IDS.to("meta"), IDS)
    with pytest.raises(streamfx.NotComparableError, match="loss= return a tensor with one element"):
        streamfx.verify(Causal(), IDS, IDS, loss=lambda out: torch.stack((out, out)))
    with pytest.raises(streamfx.NotComparableError, match="has no loss"):
        streamfx.verify(lambda ids: ids + 1, IDS)
    with pytest.raises(streamfx.NotComparableError, match="a str, which cannot be called"):
        streamfx.verify("model", IDS)  # type: ignore[arg-type]
    with pytest.raises(streamfx.NotComparableError, match="loss is a str"):
        streamfx.verify(Causal(), IDS, IDS, loss="mean")  # type: ignore[arg-type]
    with pytest.raises(
        streamfx.NotComparableError, match="in eager, without the backend, it raises ValueError: Expected input batch_size"
    ):
        streamfx.verify(Causal(), IDS, IDS[:, 1:])
    with pytest.raises(streamfx.OptionError, match="did you mean 'chunk_size'"):
        streamfx.verify(Causal(), IDS, IDS, options={"chunksize": 2})
    with pytest.raises(streamfx.OverBudgetError, match="less than any plan"):
        streamfx.verify(Causal(), IDS, IDS, options={"memory_budget": 3})


def test_a_gradient_of_rounding_errors_has_no_digits_to_compare() -> None:
    noise, other = torch.tensor([1e-17]), torch.tensor([-2e-17])
    assert relative_difference(noise, other, 0.0) > 1
    assert relative_difference(noise, other, 1e-4) < 1e-12
    assert relative_difference(None, None, 0.0) == 0
    assert relative_difference(None, torch.zeros(2), 0.0) == 0
    assert relative_difference(torch.ones(2), None, 0.0) == float("inf")


def test_nothing_requires_a_gradient() -> None:
    model = Causal().requires_grad_(False)
    result = streamfx.verify(model, IDS, IDS, options={"outputs": "dense"})
    assert result.ok
    assert "nothing requires a gradient" in str(result)
