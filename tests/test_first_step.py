"""One line when a step is compiled: logged, and shown by what `enable` returned."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import streamfx
from tests.support.small import Causal, tokens

IDS = tokens(2, 64)
LINE = re.compile(
    r"compiled in \d+\.\d s: every stage streams, 16 to 64 rows per chunk, peak predicted [\d.]+ (bytes|KiB|MiB) for"
)


def test_the_line_is_there_after_the_first_step_and_not_before() -> None:
    model = Causal()
    done = streamfx.enable(model, chunk_size=16)
    assert "compiled in" not in str(done)
    for _ in range(2):
        model(IDS, IDS).backward()
    assert len(done.compiled) == 1 and LINE.search(str(done))
    with torch.no_grad():
        model(IDS, IDS)
    assert len(done.compiled) == 1  # a graph without gradients is no step


def test_the_predicted_peak_is_that_of_explain() -> None:
    model = Causal()
    done = streamfx.enable(model, chunk_size=16)
    model(IDS, IDS).backward()
    peak = streamfx.explain(Causal(), IDS, IDS, chunk_size=16).summary()["peak_bytes"]
    assert f"peak predicted {streamfx.budget.in_bytes(peak)} for" in str(done)


def test_the_line_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "streamfx"):
        step = torch.compile(Causal(), backend="streambp", options={"chunk_size": 16})
        step(IDS, IDS).backward()
        step(IDS, IDS).backward()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("compiled in ")]
    assert len(lines) == 1 and LINE.match(lines[0])


def test_a_step_in_which_nothing_streams_says_why() -> None:
    model = nn.Linear(4, 4)
    done = streamfx.enable(model, memory_budget="1G", bodies="eager")
    model(torch.randn(3, 4)).sum().backward()
    assert "nothing streams: everything fits into the memory budget" in str(done)


def test_what_cannot_be_described_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr("streamfx.tools.report.notices.cost_of", broken)
    model = Causal()
    done = streamfx.enable(model, chunk_size=16)
    model(IDS, IDS).backward()
    assert "it cannot be described: ZeroDivisionError: no" in str(done)


def test_steps_of_other_models_are_not_shown() -> None:
    model, other = Causal(), Causal()
    done = streamfx.enable(model, chunk_size=16)
    torch.compile(other, backend="streambp")(IDS, IDS).backward()
    assert done.compiled == []
