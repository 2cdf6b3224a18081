"""Notices of a step: one line after it was compiled, and a warning if much work saves no memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.tools.report import notices
from tests.support.layered import Layered
from tests.support.small import Causal, tokens
from tests.support.spread import only

pytestmark = pytest.mark.compiled

Warnings = Callable[[], list[str]]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Warnings:
    """The warnings so far; graphs with little work warn, too."""
    notices._warned.clear()
    monkeypatch.setattr(notices, "MIN_FLOPS", 1)
    return lambda: [item.getMessage() for item in caplog.records if (item.levelname, item.name) == ("WARNING", "streamfx")]


class Solving(nn.Module):
    """Cannot stream: a system of equations has no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.w, x).square().sum()


def step(model: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="streambp", options={"bodies": "eager", **options})(*inputs).backward()


ONE_CHUNK = {"chunk_size": 256, "loss_chunk_size": 256}  # saves nothing


def test_each_model_without_a_gain_warns_once(warned: Warnings) -> None:
    model = Layered(3, 32)
    step(model, tokens(2, 256), **ONE_CHUNK)
    summary = streamfx.explain(model, tokens(2, 256), options=ONE_CHUNK).summary()
    assert summary["peak_bytes"] > summary["checkpointing_peak_bytes"]
    (text,) = warned()
    assert f"without saving memory: predicted peak {streamfx.budget.format_bytes(summary['peak_bytes'])}" in text
    assert "streamfx.explain" in text
    step(model, tokens(2, 96), **ONE_CHUNK)
    assert len(warned()) == 1
    for _ in range(2):
        step(Solving(), torch.randn(8, 8))
    _, text = warned()
    assert "runs unchunked: no dimension of this graph can be streamed" in text and "streamfx.explain" in text


SAVING = [{"memory_budget": "1G"}, {"memory_budget": "2500KiB"}, {"chunk_size": 32, "loss_chunk_size": 32}]


@pytest.mark.parametrize("options", only(SAVING[:1], SAVING), ids=str)
def test_a_step_that_saves_memory_or_fits_is_silent(options: dict[str, Any], warned: Warnings) -> None:
    step(Layered(3, 32), tokens(2, 256), **options)
    assert warned() == []


IDS = tokens(2, 64)


def test_an_error_in_a_notice_does_not_stop_a_step(warned: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(notices, "checkpointing_bytes", broken)
    monkeypatch.setattr("streamfx.tools.report.notices.cost_of", broken)
    done = streamfx.enable(model := Causal(), chunk_size=16)
    model(IDS, IDS).backward()
    assert warned() == [] and "its report failed: ZeroDivisionError: no" in str(done)


WRITES: list[tuple[Callable[..., Any], tuple[int, ...], bool]] = [
    (Tensor.add_, (), True),
    (Tensor.copy_, (), True),
    (lambda seen, value: seen.__setitem__(..., value), (), False),
    (Tensor.add_, (1,), False),
]


@pytest.mark.parametrize(("write", "shape", "is_lost"), WRITES)
def test_a_lost_write_is_reported(warned: Warnings, write: Callable[..., Any], shape: tuple[int, ...], is_lost: bool) -> None:
    """AOTAutograd drops some writes, under torch's own backend, too (until 2.13); no other write is reported."""
    is_lost = is_lost and torch.__version__ < "2.14"
    model, x = nn.Linear(8, 8).double(), torch.randn(2, 8, 8).double()
    model.register_buffer("seen", torch.zeros(shape, dtype=torch.float64))

    def counting(x: Tensor) -> Tensor:
        found = model(x).square().mean()
        write(model.seen, found.detach())
        return found

    torch.compile(counting, backend="aot_eager")(x)
    assert bool(model.get_buffer("seen").any()) == (not is_lost) and warned() == []
    step(counting, x)
    assert bool(model.get_buffer("seen").any()) == (not is_lost)
    assert len([text for text in warned() if "this write is lost" in text and "test_no_gain.py" in text]) == is_lost


LINE = re.compile(
    r"compiled in \d+\.\d s: every stage streams, 16 to 64 rows per chunk, peak predicted ([\d.]+ (?:bytes|KiB|MiB)) for"
)


def test_the_line_of_a_step_appears_once_after_its_first_call(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and in the enabled model's text; its peak is that of explain."""
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
