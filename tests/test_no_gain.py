"""What a step says of itself: one line when it is compiled, and a warning where much work saves no memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.tools.report import no_gain_notice
from tests.support.small import Causal
from tests.support.small import tokens as small_tokens
from tests.support.spread import only
from tests.test_peaks import Decoder, tokens

pytestmark = pytest.mark.compiled


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings, of graphs with any work at all."""
    no_gain_notice._warned.clear()
    monkeypatch.setattr(no_gain_notice, "MUCH_WORK", 1)
    return lambda: [item.getMessage() for item in caplog.records if (item.levelname, item.name) == ("WARNING", "streamfx")]


class Mixing(nn.Module):
    """Nothing of it can stream: a system of equations has no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.w, x).square().sum()


def step(model: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="streambp", options={"bodies": "eager", **options})(*inputs).backward()


WHOLE = {"chunk_size": 256, "loss_chunk_size": 256}  # one chunk of all rows: nothing is saved


def test_what_runs_as_it_stood_says_why_once(told: Any) -> None:
    for _ in range(2):
        step(Mixing(), torch.randn(8, 8))
    (text,) = told()
    assert "is run without streaming: no dimension of this graph can be streamed" in text and "streamfx.explain" in text


def test_a_peak_that_is_not_below_checkpointings_is_told_with_both(told: Any) -> None:
    """Once for all lengths; but another model is told, too."""
    model = Decoder()
    step(model, tokens(256), **WHOLE)
    summary = streamfx.explain(model, tokens(256), options=WHOLE).summary()
    assert summary["peak_bytes"] > summary["checkpointing_peak_bytes"]
    (text,) = told()
    assert f"saves nothing: {streamfx.budget.in_bytes(summary['peak_bytes'])} are predicted" in text
    assert "streamfx.explain" in text
    step(model, tokens(96), **WHOLE)
    assert len(told()) == 1
    step(Mixing(), torch.randn(8, 8))
    assert len(told()) == 2


SAVING = [{"memory_budget": "1G"}, {"memory_budget": "2500KiB"}, {"chunk_size": 32, "loss_chunk_size": 32}]


@pytest.mark.parametrize("options", only(SAVING[:1], SAVING), ids=str)
def test_a_step_that_saves_memory_or_fits_is_silent(options: dict[str, Any], told: Any) -> None:
    step(Decoder(), tokens(256), **options)
    assert told() == []


def test_what_cannot_be_told_is_compiled_all_the_same(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(no_gain_notice, "checkpointing_bytes", broken)
    monkeypatch.setattr("streamfx.tools.report.notices.cost_of", broken)
    done = streamfx.enable(model := Causal(), chunk_size=16)
    model(IDS, IDS).backward()
    assert told() == [] and "it cannot be described: ZeroDivisionError: no" in str(done)


@pytest.mark.parametrize(
    ("write", "shape", "is_lost"),
    [
        (Tensor.add_, (), True),
        (Tensor.copy_, (), True),
        (lambda seen, value: seen.__setitem__(..., value), (), False),
        (Tensor.add_, (1,), False),
    ],
    ids=["add", "copy", "at", "a dimension"],
)
def test_a_write_that_aotautograd_drops_is_told(
    told: Any, write: Callable[..., Any], shape: tuple[int, ...], is_lost: bool
) -> None:
    """And no other: what is told is what is lost, under torch's own backend, too."""
    model, x = nn.Linear(8, 8).double(), torch.randn(2, 8, 8).double()
    model.register_buffer("seen", torch.zeros(shape, dtype=torch.float64))

    def counting(x: Tensor) -> Tensor:
        found = model(x).square().mean()
        write(model.seen, found.detach())
        return found

    torch.compile(counting, backend="aot_eager")(x)
    assert bool(model.get_buffer("seen").any()) == (not is_lost) and told() == []
    step(counting, x)
    assert bool(model.get_buffer("seen").any()) == (not is_lost)
    assert len([text for text in told() if "this write is lost" in text and "test_no_gain.py" in text]) == is_lost


# -- the line of a step

IDS = small_tokens(2, 64)
LINE = re.compile(
    r"compiled in \d+\.\d s: every stage streams, 16 to 64 rows per chunk, peak predicted ([\d.]+ (?:bytes|KiB|MiB)) for"
)


def test_the_line_is_there_after_the_first_step_and_not_before(caplog: pytest.LogCaptureFixture) -> None:
    """Logged once, and shown; its peak is that of explain. Steps of other models are not shown."""
    model = Causal()
    done, other = streamfx.enable(model, chunk_size=16), streamfx.enable(Causal(), chunk_size=16)
    assert "compiled in" not in str(done)
    with caplog.at_level("INFO", "streamfx"):
        for _ in range(2):
            model(IDS, IDS).backward()
    with torch.no_grad():
        model(IDS, IDS)
    assert len(done.compiled) == 1  # a graph without gradients is no step
    shown, (logged,) = LINE.search(str(done)), [text for text in caplog.messages if text.startswith("compiled in ")]
    assert shown is not None and LINE.match(logged) and other.compiled == []
    assert shown[1] == streamfx.budget.format_bytes(streamfx.explain(Causal(), IDS, IDS, chunk_size=16).summary()["peak_bytes"])
