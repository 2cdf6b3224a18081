"""A step with much work that saves no memory says so once, with the reason; what saves some, or fits on purpose, is silent."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.tools.report import no_gain_notice
from streamfx.tools.report.no_gain_notice import checkpointing_bytes
from tests.test_peaks import Decoder, tokens


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings, of graphs with any work at all."""
    torch._dynamo.reset()
    no_gain_notice._told.clear()
    monkeypatch.setattr(no_gain_notice, "MUCH_WORK", 1)

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and record.name == "streamfx"]

    return warnings


class Mixing(nn.Module):
    """Nothing of it can stream: a system of equations has no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.w, x).square().sum()


def step(model: nn.Module, *inputs: Tensor, **options: Any) -> None:
    compiled = torch.compile(model, backend="streambp", options={"bodies": "eager", **options})
    compiled(*inputs).backward()


def test_what_runs_as_it_stood_says_why_once(told: Any) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        step(Mixing(), torch.randn(8, 8))
    assert len(told()) == 1
    assert "is run without streaming: no dimension of this graph can be streamed" in told()[0]
    assert "streamfx.explain" in told()[0]


def test_a_peak_that_is_not_below_checkpointings_is_told_with_both(told: Any) -> None:
    """One chunk of all rows: nothing is saved."""
    ids = tokens(256)
    whole = {"chunk_size": 256, "loss_chunk_size": 256}
    step(Decoder(), ids, **whole)
    summary = streamfx.explain(Decoder(), ids, options=whole).summary()
    assert summary["peak_bytes"] > summary["checkpointing_peak_bytes"]
    (text,) = told()
    assert f"saves nothing: {streamfx.budget.in_bytes(summary['peak_bytes'])} are predicted" in text
    assert "streamfx.explain" in text


@pytest.mark.parametrize("length", [64, 256])
def test_what_checkpointing_takes_is_about_what_it_is_measured_to_take(length: int) -> None:
    explanation = streamfx.explain(Decoder(), tokens(length), chunk_size=32)
    expected = explanation.summary()["checkpointing_peak_bytes"]
    assert checkpointing_bytes(explanation.call.graphs[0].facts) == pytest.approx(expected, rel=0.15)


def test_other_lengths_are_not_told_again(told: Any) -> None:
    """But another model is."""
    model = Decoder()
    for length in (64, 96, 128):
        torch._dynamo.reset()
        step(model, tokens(length), chunk_size=length, loss_chunk_size=length)
    assert len(told()) == 1
    step(Mixing(), torch.randn(8, 8))
    assert len(told()) == 2


def test_a_step_that_saves_memory_is_silent(told: Any) -> None:
    step(Decoder(), tokens(256), chunk_size=32, loss_chunk_size=32)
    assert told() == []


def test_a_step_that_fits_runs_as_it_stands_on_purpose(told: Any) -> None:
    step(Decoder(), tokens(64), memory_budget="1G")
    assert told() == []


def test_a_budget_that_is_made_use_of_is_no_loss(told: Any) -> None:
    step(Decoder(), tokens(256), memory_budget="2500KiB")
    assert told() == []


def test_who_asks_what_streams_is_told_there(told: Any) -> None:
    streamfx.explain(Decoder(), tokens(256), chunk_size=256, loss_chunk_size=256).summary()
    streamfx.explain(Mixing(), torch.randn(8, 8)).summary()
    streamfx.verify(Decoder(), tokens(256), chunk_size=256, loss_chunk_size=256)
    assert told() == []


def test_little_work_is_silent(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_gain_notice, "MUCH_WORK", 10**11)
    step(Decoder(), tokens(256), chunk_size=256, loss_chunk_size=256)
    step(Mixing(), torch.randn(8, 8))
    assert told() == []


def test_what_cannot_be_told_is_compiled_all_the_same(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(no_gain_notice, "checkpointing_bytes", broken)
    step(Decoder(), tokens(64), chunk_size=32)
    assert told() == []


class Counting(nn.Module):
    """Writes to a buffer in one of several ways."""

    def __init__(self, seen: Tensor, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(8, 8).double(), write
        self.seen = nn.Buffer(seen)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x).square().mean()
        self.write(self.seen, found.detach())
        return found


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda seen, value: seen.add_(value),
    "plus": lambda seen, value: operator.iadd(seen, value),
    "copy": lambda seen, value: seen.copy_(value),
    "at": lambda seen, value: seen.__setitem__(..., value),
}


@pytest.mark.parametrize("kind", ["a number", "a dimension", "float32"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_aotautograd_drops_is_told(told: Any, write: str, kind: str) -> None:
    """And no other: what is told is what is lost, under torch's own backend, too."""
    shape, dtype = ((1,) if kind == "a dimension" else ()), torch.float32 if kind == "float32" else torch.float64
    model, x = Counting(torch.zeros(shape, dtype=dtype), WRITES[write]), torch.randn(2, 8, 8).double()
    torch.compile(model, backend="aot_eager")(x)
    is_lost = not bool(model.get_buffer("seen").any())
    assert is_lost == (kind == "a number" and write != "at") and told() == []
    torch._dynamo.reset()
    step(model, x)
    assert bool(model.get_buffer("seen").any()) == (not is_lost)
    assert len([text for text in told() if "this write is lost" in text and "test_no_gain.py" in text]) == is_lost
