"""`streamfx.verify` finds wrong gradients and changes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import NotComparableError
from streamfx.budget import format_bytes
from streamfx.kernels import accumulate
from streamfx.runtime import buffers
from streamfx.tools.inspect.chunk_override import NOT_CHUNKED, ONE_CHUNK
from streamfx.tools.inspect.verify import default_loss, relative_difference
from streamfx.tools.report.text import streams_of
from tests.support.small import WIDTH, Causal, Streams, tokens
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

IDS = tokens(2, 6)
ANY: Any = streamfx


def test_a_streamed_decoder_equals_eager() -> None:
    model = Causal().double()
    result = streamfx.verify(model, IDS, IDS, chunk_size=2, outputs="dense")
    assert result.ok and result.max_error < 1e-14 and result.tolerance == 1e-12
    assert set(result.errors) == {name for name, _ in model.named_parameters()}
    assert result.loss == pytest.approx(result.streamed_loss, rel=1e-14)
    text = str(streamfx.verify(Causal(), IDS, IDS, chunk_size=4, outputs="dense"))
    for part in ("equal to eager", "tolerance 1e-04 (float32)", "head.weight", "norm in eager"):
        assert part in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize("number", [0.125, float("nan"), float("inf")])
def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    """The fault: the first element of each weight's gradient differs."""
    right = accumulate.add_product

    def wrong(total: Tensor, left: Tensor, right_: Tensor, is_first: bool) -> None:
        right(total, left, right_, is_first)
        total[0, 0] += number

    monkeypatch.setattr(accumulate, "add_product", wrong)
    result = streamfx.verify(Causal(), IDS, IDS, chunk_size=4, outputs="dense")
    assert not result.ok and "NOT equal to eager" in str(result)
    assert number == 0.125 or result.max_error == float("inf")


def test_differences_of_two_gradients() -> None:
    """NaN equals NaN; rounding errors have no digits to compare; no gradient equals zeros."""
    some = torch.tensor([1.0, float("nan"), float("inf")])
    assert relative_difference(some, some, 0.0) == 0
    assert relative_difference(torch.tensor([1.0, 2.0, float("inf")]), some, 0.0) == float("inf")
    noise, other = torch.tensor([1e-17]), torch.tensor([-2e-17])
    assert relative_difference(noise, other, 0.0) > 1
    assert relative_difference(noise, other, 1e-4) < 1e-12
    assert relative_difference(None, None, 0.0) == relative_difference(None, torch.zeros(2), 0.0) == 0
    assert relative_difference(torch.ones(2), None, 0.0) == float("inf")


def test_several_chunks_run_unless_a_size_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """So verify finds a fault in the values that chunks pass on. A single chunk is reported."""
    model, ids = Causal().double(), tokens(2, 12)
    text = str(streamfx.verify(model, ids, ids, outputs="dense"))
    assert ONE_CHUNK not in text and "nothing ran in chunks" not in text
    at_once = streamfx.verify(model, ids, ids, outputs="dense", chunk_size=12)
    assert at_once.ok and ONE_CHUNK in str(at_once)
    unchunked = streamfx.verify(model, IDS, IDS, memory_budget="8GiB", bodies="eager")
    assert unchunked.ok and NOT_CHUNKED in str(unchunked)

    def forgetful(visible: Tensor, own: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
        """Lose the keys of earlier chunks."""
        visible.zero_()
        own.copy_(value.reshape(own.shape))
        return visible.reshape(shape)

    monkeypatch.setattr(buffers, "append", forgetful)
    assert streamfx.verify(model, ids, ids, outputs="dense", chunk_size=12).ok
    assert not streamfx.verify(model, ids, ids, outputs="dense").ok


@pytest.mark.parametrize("how", only(["enabled", "part"], ["enabled", "compiled", "part", "function"]))
def test_eager_runs_without_the_backend(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for an enabled model, whose counts stay; also for a model with a compiled part."""
    model = Causal().double()
    enabled = streamfx.enable(model, outputs="dense") if how == "enabled" else None
    part: Any = model.head if how == "part" else model
    call = torch.compile(lambda *args: model(*args), backend="streambp") if how == "function" else model
    if how in ("compiled", "part"):
        part.compile(backend="streambp")
    before = str(enabled), part._compiled_call_impl
    assert streamfx.verify(call, IDS, IDS, outputs="dense").ok
    found = streamfx.explain(call, IDS, IDS, outputs="dense").summary()
    assert found == streamfx.explain(Causal().double(), IDS, IDS, outputs="dense").summary()
    assert (str(enabled), part._compiled_call_impl) == before
    monkeypatch.setattr(
        accumulate, "add_part", lambda total, part, is_first: (total.zero_() if is_first else total).add_(part, alpha=2)
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


def test_verify_changes_neither_model_nor_random_state() -> None:
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


def test_a_loss_is_chosen_or_combined_from_all_outputs() -> None:
    model = Causal()

    def two(ids: Tensor) -> dict[str, Tensor]:
        return {"hidden": model.embed(ids), "loss": model(ids, ids)}

    chosen = streamfx.verify(two, IDS, loss=lambda out: out["hidden"].sum(), outputs="dense")
    assert chosen.ok and sum(norm > 0 for norm in chosen.norms.values()) == 1 < len(chosen.norms)
    assert default_loss((torch.ones(3, 2), torch.tensor([1, 2]))).dim() == 0
    assert default_loss({"loss": torch.tensor(2.0), "more": torch.ones(3)}) == 2
    assert default_loss(torch.ones(4)) != default_loss(-torch.ones(4))


MODEL = Causal()
DROPPING = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
REFUSED: dict[str, Callable[[], Any]] = named_cases("refusals", globals())


def test_refusals() -> None:
    for text, call in REFUSED.items():
        with pytest.raises(NotComparableError, match=text):
            call()
    with pytest.raises(streamfx.OverBudgetError, match="less than any plan"):
        streamfx.verify(MODEL, IDS, IDS, memory_budget=3)


def test_gradients_of_inputs_are_compared_and_none_are_needed() -> None:
    x, y = torch.randn(5, WIDTH, requires_grad=True), torch.randn(5, WIDTH)
    assert set(streamfx.verify(Streams(), x, y=y, outputs="dense").errors) == {"w", "input [0]"} and x.grad is None
    result = streamfx.verify(Causal().requires_grad_(False), IDS, IDS, outputs="dense")
    assert result.ok and "nothing requires a gradient" in str(result)
    assert streamfx.verify(nn.Dropout(0.5).eval(), torch.randn(3, WIDTH), outputs="dense").ok


# -- five reports agree about a model

ROWS, GIVEN = 48, {"chunk_size": 16, "loss_chunk_size": 16}
Mix = Callable[[Tensor], Tensor]


class Of(Causal):
    """A decoder with another function of all rows."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids) + self.mix(self.q(self.embed(ids))).square().mean()


CASES: dict[str, tuple[Mix, dict[str, Any]]] = named_cases("five reports", globals())


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.empty(batch, length, dtype=torch.int64, device="meta")}


@pytest.mark.parametrize("name", only(["recomputed", "sorted"], CASES))
def test_five_reports_agree(name: str) -> None:
    mix, given = CASES[name]
    model, ids, options = Of(mix), tokens(2, ROWS), {**given, "bodies": "eager"}
    explained = streamfx.explain(model, ids, options=options)
    verified = streamfx.verify(model, ids, options=options)
    with torch.device("meta"):
        of_meta = Of(mix)
    planned = streamfx.plan(of_meta, seq=ROWS, batch=2, inputs=inputs, device="here", baselines=False, options=options)
    with streamfx.enable(model, options=options) as enabled:
        model(ids).backward()
        model.zero_grad()
        with streamfx.profile() as profile:
            model(ids).backward()
    (logged,), (record,) = enabled.compiled, verified.records
    summary, stages = explained.summary(), [stage.as_dict() for stage in explained.stages]
    assert verified.ok and record.plain == stages == planned.prediction.stages
    loops = {run["name"]: (stage["name"], run["chunks"]) for stage in stages for run in stage["runs"]}
    assert {loop.name: (loop.stage, loop.chunks) for loop in profile.measured.loops} == loops
    if not loops:
        assert all("nothing streams" in str(text) for text in (explained, logged.text, planned))
        return
    said = str(explained).splitlines()[1].strip().partition(";")[0]
    assert said == record.streams == streams_of(planned.prediction.explained)
    assert f"  ran: {said}, {record.rows}" in str(verified)
    assert f": {said}" in logged.text and f", {record.rows}, peak predicted {format_bytes(summary['peak_bytes'])}" in logged.text
    held = sum(parameter.nbytes for parameter in of_meta.parameters()) + ids.nbytes
    assert profile.predicted_peak_bytes == summary["peak_bytes"] == planned.prediction.peak_bytes - held
