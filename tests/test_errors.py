"""Errors of ours reach whoever calls the compiled function: as what they are, and with lines of the user's code only."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import streamfx
from streamfx import errors
from streamfx.torch_private.dynamo import raised_as_itself
from tests.support.small import Causal, tokens
from tests.support.stretches import interpreted

IDS = tokens(1, 12)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StreamFXError)]


def refusing(kind: type[errors.StreamFXError]) -> tuple[errors.StreamFXError, Callable[..., Any]]:
    error = kind("this was asked", found="that", do="something else")

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with raised_as_itself(module.graph):
            raise error

    return error, backend


def twice(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("suppressed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_arrives_as_itself(kind: type[errors.StreamFXError], suppressed: bool) -> None:
    """Neither wrapped by Dynamo, nor swallowed where it is told to run what it cannot compile."""
    error, backend = refusing(kind)
    with torch._dynamo.config.patch(suppress_errors=suppressed), pytest.raises(kind) as found:
        torch.compile(twice, backend=backend)(torch.ones(2))
    assert found.value is error
    assert str(found.value) == "this was asked\n  found that\n  do    something else"
    assert found.value.__cause__ is None
    assert found.value.__suppress_context__
    if hasattr(found.value, "add_note"):  # Python 3.11
        assert "x * 2" in found.value.__notes__[-1]
    assert not any("streamfx/" in frame.filename or "convert_frame" in frame.filename for frame in frames(found.value))


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def test_code_between_graphs_may_catch_it() -> None:
    """After a graph break, the error passes through the user's own frames before it reaches the compiled call."""
    _, backend = refusing(errors.OverBudgetError)

    def inner(x: Tensor) -> Tensor:
        return x * 2

    def outer(x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return inner(x)
        except streamfx.OverBudgetError as error:
            return x + error.smallest

    assert torch.compile(outer, backend=backend)(torch.ones(2)).sum() == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"chunk_sise": 8}, streamfx.OptionError),
        ({"memory_budget": "1KiB"}, streamfx.OverBudgetError),
        ({"strict": True}, streamfx.NotStreamedError),
    ],
)
def test_errors_of_a_compilation(options: dict[str, Any], kind: type[Exception]) -> None:
    class Cumulative(Causal):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(ids, labels) + self.embed(ids).sort(1)[0].square().mean()
            return loss

    model = Cumulative().double()
    for _ in range(2):  # nothing is left of the first attempt
        with pytest.raises(kind) as found:
            torch.compile(model, backend="streambp", options=options)(IDS, IDS)
        assert type(found.value) is kind
        own = [frame.name for frame in frames(found.value) if "/torch/" not in frame.filename]
        assert own == ["test_errors_of_a_compilation"]
    torch.compile(model, backend="streambp", options={"chunk_size": 5})(IDS, IDS).backward()
    with pytest.raises(streamfx.OptionError, match="reduce-overhead"):
        torch.compile(model, backend="streambp", mode="reduce-overhead")(IDS, IDS)


# -- errors of operators, at run time


class Deep(Causal):
    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embed(ids)
        for _ in range(2):
            q, k, v = (project(x)[:, None] for project in (self.q, self.k, self.v))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


with_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")


def note_of(error: BaseException) -> str:
    (note,) = (note for note in getattr(error, "__notes__", ()) if "raised by" in note)
    return str(note)


@with_notes
@pytest.mark.parametrize("bodies", ["eager", "inductor"])
@pytest.mark.parametrize(("kind", "line"), [("labels", "F.cross_entropy(logits"), ("ids", "x = self.embed(ids)")])
def test_an_operators_error_names_the_line(kind: str, line: str, bodies: str) -> None:
    """It happens in a loop of ours: the message is eager's, and a note says where in the model that is."""
    model, bad = Deep().double(), IDS.clone()
    bad[0, 7] = 99
    given = (IDS, bad) if kind == "labels" else (bad, IDS)
    with pytest.raises(IndexError) as wanted:
        model(*given)
    call = torch.compile(model, backend="streambp", options={"chunk_size": 5, "loss_chunk_size": 5, "bodies": bodies})
    with interpreted():
        call(IDS, IDS)[0].backward()
        with pytest.raises(IndexError) as found:
            call(*given)[0].backward()
    assert str(found.value) == str(wanted.value)
    assert line in note_of(found.value)
    assert "test_errors.py" in note_of(found.value)


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_the_log_says_in_short_what_becomes_of_a_graph(level: str, caplog: pytest.LogCaptureFixture) -> None:
    """As `TORCH_LOGS="streamfx"` shows it; a graph that runs as it stands has a reason."""
    with caplog.at_level(level, "streamfx"):
        torch.compile(Deep().double(), backend="streambp", options={"chunk_size": 5})(IDS, IDS)
        torch.compile(lambda x: x.sort()[0] * 2, backend="streambp")(torch.ones(3, requires_grad=True))
    said = [record.getMessage() for record in caplog.records if record.name == "streamfx"]
    if level == "WARNING":
        assert not said
        return
    streamed, first, whole, second = said
    assert "every stage streams, 5 to 12 rows per chunk" in first and "nothing streams" in second
    assert streamed.startswith("a graph of 12 rows: every stage streams")
    assert "(predicted)" in streamed
    assert [row.split()[-7:-4] for row in streamed.splitlines() if "causal" in row] == [["causal", "5", "3"]] * 2
    assert whole.startswith("a graph runs as it stands: no dimension of this graph can be streamed")


@with_notes
def test_an_error_of_what_runs_whole_names_the_line() -> None:
    def look_up(table: Tensor, rows: Tensor) -> Tensor:
        picked = table[rows]
        return picked.sort()[0].sum()

    table = torch.randn(5, requires_grad=True)
    call = torch.compile(look_up, backend="streambp")
    call(table, torch.tensor([1, 2])).backward()
    with pytest.raises(IndexError) as found:
        call(table, torch.tensor([1, 9]))
    assert "aten.index.Tensor" in note_of(found.value)
    assert "picked = table[rows]" in note_of(found.value)


@with_notes
def test_an_error_of_a_loop_names_a_line_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for what a loop makes, in the backward half, for one."""
    model = Deep().double()
    loss, _ = torch.compile(model, backend="streambp", options={"chunk_size": 5})(IDS, IDS)

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr("streamfx.runtime.loop.Loop._new_buffer", fails)
    with pytest.raises(MemoryError) as found:
        loss.backward()
    assert "test_errors.py" in note_of(found.value)
