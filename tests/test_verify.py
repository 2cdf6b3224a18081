"""What `streamfx.verify` measures, and that it leaves no mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import NotComparableError
from streamfx.kernels import accumulate
from streamfx.runtime import buffers
from streamfx.tools.inspect.chunk_override import NOT_CHUNKED, ONE_CHUNK
from streamfx.tools.inspect.verify import default_loss, relative_difference
from tests.support.small import WIDTH, Causal, Streams, tokens
from tests.support.spread import only

pytestmark = pytest.mark.compiled

IDS = tokens(2, 6)


def test_a_streamed_decoder_is_the_same() -> None:
    model = Causal().double()
    result = streamfx.verify(model, IDS, IDS, chunk_size=2, outputs="dense")
    assert result.ok and result.max_error < 1e-14 and result.tolerance == 1e-12
    assert set(result.errors) == {name for name, _ in model.named_parameters()}
    assert result.loss == pytest.approx(result.streamed_loss, rel=1e-14)
    text = str(streamfx.verify(Causal(), IDS, IDS, chunk_size=4, outputs="dense"))
    for part in ("the same as eager", "tolerance 1e-04 (float32)", "head.weight", "norm in eager"):
        assert part in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize("number", [0.125, float("nan"), float("inf")])
def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    """Where the first number of each weight's gradient is changed, however small the loss's own difference is."""
    right = accumulate.add_product

    def wrong(total: Tensor, left: Tensor, right_: Tensor, is_first: bool) -> None:
        right(total, left, right_, is_first)
        total[0, 0] += number

    monkeypatch.setattr(accumulate, "add_product", wrong)
    result = streamfx.verify(Causal(), IDS, IDS, chunk_size=4, outputs="dense")
    assert not result.ok and "NOT the same as eager" in str(result)
    assert number == 0.125 or result.max_error == float("inf")


def test_when_two_gradients_differ() -> None:
    """Numbers that are none in eager either do not, nor do rounding errors, which have no digits to compare."""
    some = torch.tensor([1.0, float("nan"), float("inf")])
    assert relative_difference(some, some, 0.0) == 0
    assert relative_difference(torch.tensor([1.0, 2.0, float("inf")]), some, 0.0) == float("inf")
    noise, other = torch.tensor([1e-17]), torch.tensor([-2e-17])
    assert relative_difference(noise, other, 0.0) > 1
    assert relative_difference(noise, other, 1e-4) < 1e-12
    assert relative_difference(None, None, 0.0) == relative_difference(None, torch.zeros(2), 0.0) == 0
    assert relative_difference(torch.ones(2), None, 0.0) == float("inf")


def test_what_chunks_hand_on_is_seen_unless_a_size_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows would be one chunk: then it is one that says so."""
    model, ids = Causal().double(), tokens(2, 12)
    assert (
        ONE_CHUNK not in (said := str(streamfx.verify(model, ids, ids, outputs="dense"))) and "nothing ran in chunks" not in said
    )
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


def test_a_step_that_fits_into_its_budget_as_it_stands_says_little() -> None:
    found = streamfx.verify(Causal().double(), IDS, IDS, memory_budget="8GiB", bodies="eager")
    assert found.ok and NOT_CHUNKED in str(found)


HOW = ["enabled", "compiled", "a part that is compiled", "a function"]


@pytest.mark.parametrize("how", only(["enabled", "a part that is compiled"], HOW))
def test_eager_is_the_model_as_it_was_written(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with is not the backend once more, where a model was enabled before, and its calls are not counted."""
    model = Causal().double()
    enabled = streamfx.enable(model, outputs="dense") if how == "enabled" else None
    part: Any = model.head if how == "a part that is compiled" else model
    call = torch.compile(lambda *args: model(*args), backend="streambp") if how == "a function" else model
    if how in ("compiled", "a part that is compiled"):
        part.compile(backend="streambp")
    before = str(enabled), part._compiled_call_impl
    assert streamfx.verify(call, IDS, IDS, outputs="dense").ok
    found = streamfx.explain(call, IDS, IDS, outputs="dense").summary()
    assert found == streamfx.explain(Causal().double(), IDS, IDS, outputs="dense").summary()
    assert (str(enabled), part._compiled_call_impl) == before
    monkeypatch.setattr(
        accumulate, "add", lambda total, part, is_first: (total.zero_() if is_first else total).add_(part, alpha=2)
    )
    torch._dynamo.reset()
    assert not streamfx.verify(call, IDS, IDS, outputs="dense").ok


class Counting(nn.Module):
    """Writes to buffers and attributes, as models with statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x).square().sum(-1).tanh().mean()


def test_nothing_is_left_behind() -> None:
    model = Counting()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)

    def state() -> list[Tensor]:
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return [*(value.clone() for value in model.state_dict().values()), *gradients, torch.get_rng_state()]

    x, before = torch.randn(6, WIDTH), state()
    before[-1] = torch.get_rng_state()
    assert streamfx.verify(model, x, outputs="dense").ok
    assert all(map(torch.equal, state(), before)) and len(state()) == len(before) and model.calls == 0


def test_loss_picks_the_number() -> None:
    model = Causal()

    def two(ids: Tensor) -> dict[str, Tensor]:
        return {"hidden": model.embed(ids), "loss": model(ids, ids)}

    chosen = streamfx.verify(two, IDS, loss=lambda out: out["hidden"].sum(), outputs="dense")
    assert chosen.ok and sum(norm > 0 for norm in chosen.norms.values()) == 1 < len(chosen.norms)


def test_without_a_loss_outputs_are_combined() -> None:
    output = (torch.ones(3, 2), torch.tensor([1, 2]))
    assert default_loss(output).dim() == 0
    assert default_loss({"loss": torch.tensor(2.0), "more": torch.ones(3)}) == 2
    assert default_loss(torch.ones(4)) != default_loss(-torch.ones(4))


MODEL = Causal()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


APART: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (NotComparableError, "draws random numbers", lambda: streamfx.verify(dropping(), torch.randn(3, WIDTH))),
    (
        NotComparableError,
        "no graph of it arrives",
        lambda: streamfx.verify(lambda *args: torch.compiler.disable(MODEL)(*args), IDS, IDS),
    ),
    (NotComparableError, "holds no data", lambda: streamfx.verify(Causal(), IDS.to("meta"), IDS)),
    (
        NotComparableError,
        "loss= return a tensor with one element",
        lambda: streamfx.verify(Causal(), IDS, IDS, loss=lambda out: out[None].expand(2)),
    ),
    (NotComparableError, "has no loss", lambda: streamfx.verify(lambda ids: ids + 1, IDS)),
    (NotComparableError, "a str, which cannot be called", lambda: streamfx.verify("model", IDS)),  # type: ignore[arg-type]
    (NotComparableError, "loss is a str", lambda: streamfx.verify(Causal(), IDS, IDS, loss="mean")),  # type: ignore[arg-type]
    (
        NotComparableError,
        "in eager, without the backend, it raises ValueError: Expected input batch_size",
        lambda: streamfx.verify(Causal(), IDS, IDS[:, 1:]),
    ),
    (streamfx.OverBudgetError, "less than any plan", lambda: streamfx.verify(Causal(), IDS, IDS, memory_budget=3)),
]


def test_what_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said, call in APART:
        with pytest.raises(error, match=said):
            call()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(NotComparableError, match="is switched off"):
        streamfx.verify(Causal(), IDS, IDS)


def test_what_requires_a_gradient_is_compared() -> None:
    x, y = torch.randn(5, WIDTH, requires_grad=True), torch.randn(5, WIDTH)
    assert set(streamfx.verify(Streams(), x, y=y, outputs="dense").errors) == {"w", "input [0]"} and x.grad is None
    result = streamfx.verify(Causal().requires_grad_(False), IDS, IDS, outputs="dense")
    assert result.ok and "nothing requires a gradient" in str(result)
    assert streamfx.verify(dropping().eval(), torch.randn(3, WIDTH), outputs="dense").ok
