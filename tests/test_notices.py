"""Notices of a step: one line after it was compiled, and a warning if much work saves no memory; reasons of fallbacks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.tools.inspect.tracing import traced
from streamfx.tools.report import notices
from streamfx.tools.report.fallback_reasons import (
    BY_INDEX,
    JOINED,
    ON_HOST,
    OTHER,
    OTHER_DIMENSION,
    PARTS,
    RANKS,
    advice_on_break,
    obstacles,
)
from tests.support.collectives import data_of
from tests.support.layered import Layered
from tests.support.over_ranks import one_of_many
from tests.support.sharded import Decoder as ByRanks
from tests.support.small import Causal, tokens
from tests.support.spread import only, spread
from tests.support.used import Mixed, batch, used
from tests.test_tensor_parallel import Ulysses

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
    assert len([text for text in warned() if "this write is lost" in text and "test_notices.py" in text]) == is_lost


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


# -- reasons of fallbacks, in the words of a user, with a replacement to write


def order(x: Tensor) -> Tensor:
    return x.detach().sum((0, 2)).argsort()


def of_all(summary: Tensor, x: Tensor) -> Tensor:
    """Give each row the mean of a few."""
    return summary.mean(1, keepdim=True).expand_as(x)


def attended(x: Tensor) -> Tensor:
    queries = torch.ones(x.shape[0], 1, 3, x.shape[2], dtype=x.dtype).cumsum(2)
    return of_all(F.scaled_dot_product_attention(queries, x[:, None], x[:, None]).mean(1), x)


def parts(x: Tensor) -> Tensor:
    one, two, three = x.split([7, 5, 7], 1)
    return torch.cat([three.sin(), two, one], 1)


def joined(x: Tensor) -> Tensor:
    """Unfused attention over rows and the sums of blocks of rows."""
    keys = torch.cat([x, x[:, :18].unflatten(1, (6, 3)).sum(2)], 1)
    return (x @ keys.mT).softmax(-1) @ keys


WHYS: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (parts, "concatenates parts with separate rows to one sequence", PARTS),
    (joined, "concatenates rows of the sequence and blocks of its rows", JOINED),
    (lambda x: of_all(x[:, ::12].sin(), x), "aten.slice.Tensor reads every 12th row of the sequence", OTHER_DIMENSION),
    (lambda x: of_all(x[:, torch.arange(3) * 5].sin(), x), "reads rows by index, from anywhere in the sequence", BY_INDEX),
    (
        lambda x: torch.ones_like(x).index_put((torch.arange(len(x))[:, None], order(x)), x.sin()),
        "writes rows by index, anywhere in the sequence",
        BY_INDEX,
    ),
    (lambda x: x.flip(1).sin(), "changes the order of the rows of the sequence", OTHER_DIMENSION),
    (lambda x: x.sort(1).values, "mixes the rows of the sequence", OTHER_DIMENSION),
    (attended, "has queries that are not rows of the sequence", OTHER_DIMENSION),
    (lambda x: x.reshape(len(x), x.shape[2], -1).mT.sin(), "regroups rows of one length into rows of another", OTHER),
]


@pytest.mark.parametrize(("mix", "found", "do"), spread(WHYS, 3), ids=[found for _, found, _ in WHYS])
def test_a_fallback_has_a_reason_and_advice(mix: Callable[[Tensor], Tensor], found: str, do: str) -> None:
    (graph,) = traced(used(Mixed(mix)), (), batch(), {}).graphs
    reasons = [(item.found, item.do) for item in obstacles(graph.facts).values()]
    assert any(found in text and advice == do for text, advice in reasons), reasons


def test_a_graph_break_has_advice() -> None:
    """The host reads counts of rows."""

    def function(x: Tensor) -> Tensor:
        counts = (x[..., 0] > 0).sum(0).tolist()
        return sum(part.square().sum() for part in x.split([counts[0], len(x) - counts[0]]))  # type: ignore[return-value]

    report = streamfx.explain(function, torch.randn(6, 2, requires_grad=True))
    breaks = report.summary()["break_reasons"]
    assert any(ON_HOST in item["do"] for item in breaks), breaks
    assert advice_on_break("anything else", "a hint") == "a hint"


class InOwnOrder(Ulysses):
    """Sorts received rows by data of this rank alone."""

    def forward(self, x: Tensor) -> Tensor:
        arrived = self.by_rows(self.by_heads(x.unflatten(-1, (-1, 4))))
        return x.scatter_add(1, x.detach().sum(-1, keepdim=True).argsort(1).expand_as(arrived), arrived)


def test_rows_exchanged_by_ranks_have_their_own_reason() -> None:
    """Attention between two exchanges runs once for each group of heads: there is nothing to change."""
    model = ByRanks(layers=2, width=32)
    for layer, kind in zip(model.layers, (Ulysses, InOwnOrder), strict=True):
        layer.__class__ = kind
    with one_of_many(2):
        found = streamfx.explain(model, *data_of(0, 64), options={"chunk_size": 16, "loss_chunk_size": 16})
        stages, text = found.stages, str(found)
    assert stages[0].attention == ("all ranks' rows",)
    reasons = {item.operator: (item.found, item.do) for stage in stages for item in stage.obstacles}
    for name in ("attention", "attention_backward"):
        why, do = reasons[f"streamfx.{name}.default"]
        assert "rows that ranks exchange" in why and do == RANKS
    assert reasons["aten.scatter_add.default"][1] == BY_INDEX
    assert "these operators fall back and run between loops, the rest streams:" in text


def test_a_model_that_is_compiled_for_each_length_warns_once(warned: Warnings) -> None:
    """At the fourth length, with the time lost; a length that is compiled again does not count."""
    notices._seconds_by_length.clear()
    model = Causal()
    call = torch.compile(model, backend="streambp", dynamic=False, options={"chunk_size": 4})
    for length, count in ((12, 0), (13, 0), (14, 0), (15, 1), (16, 1)):
        call(tokens(1, length), tokens(1, length)).backward()
        found = [text for text in warned() if "dynamic=True" in text]
        assert len(found) == count, length
    assert re.search(r"compiled 4 times, in \d+\.\d s, for sequences of 12, 13, 14, 15 rows", found[0])
