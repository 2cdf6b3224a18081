"""Errors of ours reach whoever calls the compiled function: as what they are, and with lines of the user's code only."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import streamfx
from streamfx import errors
from streamfx.torch_dynamo import raised_as_itself
from tests.support.small import Causal, tokens

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
    assert "x * 2" in found.value.__notes__[-1]
    assert not any("streamfx/" in frame.filename or "convert_frame" in frame.filename for frame in frames(found.value))


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def test_code_between_graphs_may_catch_it() -> None:
    """After a graph break, the error passes through the user's own frames before it reaches the compiled call."""
    _, backend = refusing(errors.OverBudget)

    def inner(x: Tensor) -> Tensor:
        return x * 2

    def outer(x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return inner(x)
        except streamfx.OverBudget as error:
            return x + error.smallest

    assert torch.compile(outer, backend=backend)(torch.ones(2)).sum() == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"chunk_sise": 8}, streamfx.OptionError),
        ({"memory_budget": "1KiB"}, streamfx.OverBudget),
        ({"strict": True}, streamfx.NotStreamed),
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
