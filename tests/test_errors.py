"""Errors of ours reach whoever calls the compiled function: as what they are, and with lines of the user's code only."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import streamfx
from streamfx import errors
from streamfx.torch_private.dynamo import raised_as_itself
from tests.support.small import Causal, tokens
from tests.support.stretches import interpreted

IDS = tokens(1, 12)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StreamFXError)]


def refusing(error: Exception) -> Callable[..., Any]:
    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with raised_as_itself(module.graph):
            raise error

    return backend


@pytest.mark.parametrize("suppressed", [False, True])
def test_each_kind_arrives_as_itself(suppressed: bool) -> None:
    """Neither wrapped by Dynamo, nor swallowed where it is told to run what it cannot compile."""
    for kind in KINDS:
        torch._dynamo.reset()
        error = kind("this was asked", found="that", do="something else")
        with torch._dynamo.config.patch(suppress_errors=suppressed), pytest.raises(kind) as found:
            torch.compile(lambda x: x * 2, backend=refusing(error))(torch.ones(2))
        assert found.value is error
        assert str(error) == "this was asked\n  found that\n  do    something else"
        assert error.__cause__ is None and error.__suppress_context__
        assert "x * 2" in getattr(error, "__notes__", ["x * 2"])[-1]  # Python 3.11
        assert not any("streamfx/" in file or "convert_frame" in file for file, _ in frames(error))


def frames(error: BaseException) -> list[tuple[str, str]]:
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def test_code_between_graphs_may_catch_it() -> None:
    """After a graph break, the error passes through the user's own frames before it reaches the compiled call."""

    def outer(x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return (lambda x: x * 2)(x)
        except streamfx.OverBudget as error:
            return x + error.smallest

    backend = refusing(streamfx.OverBudget("this was asked", found="that", do="something else"))
    assert torch.compile(outer, backend=backend)(torch.ones(2)).sum() == 2


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"chunk_sise": 8}, streamfx.OptionError),
    ({"memory_budget": "1KiB"}, streamfx.OverBudget),
    ({"strict": True}, streamfx.NotStreamed),
]


def test_errors_of_a_compilation_leave_nothing() -> None:
    class Cumulative(Causal):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(ids, labels) + self.embed(ids).sort(1)[0].square().mean()
            return loss

    model = Cumulative().double()
    for options, kind in REFUSED * 2:
        with pytest.raises(kind) as found:
            torch.compile(model, backend="streambp", options=options)(IDS, IDS)
        assert type(found.value) is kind
        own = [name for file, name in frames(found.value) if "/torch/" not in file]
        assert own == ["test_errors_of_a_compilation_leave_nothing"]
    torch.compile(model, backend="streambp", options={"chunk_size": 5})(IDS, IDS).backward()
    with pytest.raises(streamfx.OptionError, match="reduce-overhead"):
        torch.compile(model, backend="streambp", mode="reduce-overhead")(IDS, IDS)


# -- errors of operators, at run time


with_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")


def note_of(error: BaseException) -> str:
    (note,) = (note for note in getattr(error, "__notes__", ()) if "raised by" in note)
    return str(note)


@with_notes
@pytest.mark.parametrize("bodies", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_an_operators_error_names_the_line(bodies: str) -> None:
    """It happens in a loop of ours: the message is eager's, and a note says where in the model that is."""
    model, bad = Causal().double(), IDS.clone()
    bad[0, 7] = 99
    call = torch.compile(model, backend="streambp", options={"chunk_size": 5, "loss_chunk_size": 5, "bodies": bodies})
    for given, line in (((IDS, bad), "F.cross_entropy(self.head(x)"), ((bad, IDS), "x = self.embed(ids)")):
        with pytest.raises(IndexError) as wanted:
            model(*given)
        with interpreted():
            call(IDS, IDS).backward()
            with pytest.raises(IndexError) as found:
                call(*given).backward()
        assert str(found.value) == str(wanted.value)
        assert line in note_of(found.value) and "small.py" in note_of(found.value)


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
    assert "aten.index.Tensor" in note_of(found.value) and "picked = table[rows]" in note_of(found.value)


@with_notes
def test_an_error_of_a_loop_names_a_line_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for what a loop makes, in the backward half, for one."""
    loss = torch.compile(Causal().double(), backend="streambp", options={"chunk_size": 5})(IDS, IDS)

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr("streamfx.runtime.loop.Loop._new_buffer", fails)
    with pytest.raises(MemoryError) as found:
        loss.backward()
    assert "small.py" in note_of(found.value)


def test_the_log_says_in_short_what_becomes_of_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    """As `TORCH_LOGS="streamfx"` shows it; a graph that runs as it stands has a reason."""
    for level in ("WARNING", "INFO"):
        assert not [record for record in caplog.records if record.name == "streamfx"]  # of the first level
        torch._dynamo.reset()
        with caplog.at_level(level, "streamfx"):
            torch.compile(Causal().double(), backend="streambp", options={"chunk_size": 5})(IDS, IDS)
            torch.compile(lambda x: x.sort()[0] * 2, backend="streambp")(torch.ones(3, requires_grad=True))
    streamed, first, whole, second = (record.getMessage() for record in caplog.records if record.name == "streamfx")
    assert "every stage streams, 5 to 12 rows per chunk" in first and "nothing streams" in second
    assert streamed.startswith("a graph of 12 rows: every stage streams") and "(predicted)" in streamed
    assert [row.split()[-7:-4] for row in streamed.splitlines() if "causal" in row] == [["causal", "5", "3"]]
    assert whole.startswith("a graph runs as it stands: no dimension of this graph can be streamed")
