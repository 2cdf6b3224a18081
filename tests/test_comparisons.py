"""`explain` and `verify` compare a call with the right baseline; their first lines follow from their figures."""

import functools  # noqa: F401  (in tests/tables)
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.frontend.backend import streambp  # noqa: F401  (in tests/tables)
from streamfx.tools.report.verdict import MIN_DIFFERENCE, MIN_GAIN
from tests.support.layered import Layered
from tests.support.small import WIDTH, Causal, Mixing, tokens  # noqa: F401  (in tests/tables)
from tests.support.tables import listed_cases, named_cases

pytestmark = pytest.mark.compiled

IDS = tokens(2, 6)
WIDE = torch.randn(2, 64, 16)


def test_nothing_is_compared_with_checkpointing_if_the_layers_are_not_called() -> None:
    model = Layered()
    found = streamfx.explain(lambda x: model.head(x).square().mean(), WIDE, chunk_size=16)
    summary = found.summary()
    assert summary["checkpointing_peak_bytes"] is None
    assert "the layers of the model are not called" in summary["not_checkpointed"]
    assert "gradient checkpointing" not in str(found).splitlines()[0]
    assert f"not compared with gradient checkpointing: {summary['not_checkpointed']}" in str(found)


def test_empty_inputs_zeros_and_nans_are_refused() -> None:
    for ids in (IDS[:, :0], IDS[:0]):
        with pytest.raises(streamfx.NotTracedError, match=r"(?s)input \[0\] of shape .*, and no matrix products.*at least one"):
            streamfx.explain(Causal(), ids, ids)
        with pytest.raises(streamfx.NotComparableError, match=r"(?s)input \[0\] of shape .*nothing was compared.*at least one"):
            streamfx.verify(Causal(), ids, ids)
    model = Causal()
    for factor in (0.0, math.nan):
        with pytest.raises(streamfx.NotComparableError, match=r"zero or NaN: nothing was compared"):
            streamfx.verify(lambda ids: model(ids, ids) * factor, IDS)  # noqa: B023


def test_threads_may_call_explain_and_verify_at_once() -> None:
    """A signal ended the process before calls waited for each other."""
    found = set()

    def look() -> None:
        model = Causal()
        found.add((str(streamfx.explain(model, IDS, IDS, chunk_size=4)), streamfx.verify(model, IDS, IDS, chunk_size=4).ok))

    look()
    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ok for _, ok in found] == [True]


HEADLINES: dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]] = named_cases("headlines", globals())


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_follows_from_the_figures(name: str) -> None:
    """A gain is reported if and only if the figures show one; a stage is a fallback only if work is outside of loops."""
    model, given, options = HEADLINES[name]
    found = streamfx.explain(model, *given, options=options)
    summary, (first, second, *_) = found.summary(), str(found).splitlines()
    less = (summary["checkpointing_peak_bytes"] or summary["baseline_peak_bytes"]) / summary["peak_bytes"]
    loops = [bool(stage.loops) for stage in found.stages]
    assert ("less memory" in first) == (less >= MIN_GAIN)
    assert ("no gain" in first) == (1 / MIN_GAIN < less < MIN_DIFFERENCE)
    assert ("times as much" in first) == (less <= 1 / MIN_GAIN)
    assert ("nothing streams" in first) == (not any(loops))
    assert not any(loops) or "run unchunked" not in second
    assert all(loops) or summary["streamed_flops_share"] < 1
    assert all(stage.loops or stage.reasons for stage in found.stages)
    assert f"{min(100 * summary['streamed_flops_share'], 100):.1f} % of it in loops" in str(found)


SINGLE_ROWS: list[tuple[Callable[..., Any], tuple[Tensor, ...], bool]] = listed_cases("single rows", globals())


def test_a_single_row_is_a_reason_of_its_own() -> None:
    for model, given, is_named in SINGLE_ROWS:
        (stage,) = streamfx.explain(model, *given).summary()["stages"]
        for part in ("the inputs are a single row", "give longer sequences"):
            assert (part in stage["reason"]) == is_named


# -- compiled models


class Two(nn.Module):
    """Layers of one class, with parameters of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def compiled(model: Any, options: Any = None) -> Any:
    return torch.compile(model, backend="streambp", options=options or {"chunk_size": 24})


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="streambp", options={"chunk_size": 24})
    return model


def enabled(model: nn.Module) -> nn.Module:
    streamfx.enable(model, chunk_size=24)
    return model


COMPILED: dict[str, Callable[[nn.Module], Any]] = named_cases("compiled", globals(), "model")


@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_keeps_its_options_and_names(how: str) -> None:
    x = torch.randn(2, 48, 8)
    model = COMPILED[how](Two())
    found = streamfx.explain(model, x)
    assert found.call.options.chunk_size == 24 and 24 in {stage.chunk_size for stage in found.stages}
    assert streamfx.explain(model, x, chunk_size=16).call.options.chunk_size == 16
    around = "0." if how == "inside of a module" else ""
    assert set(streamfx.verify(model, x).errors) == {f"{around}{name}" for name, _ in Two().named_parameters()}


def test_parameters_with_the_same_name_are_all_compared() -> None:
    """Of modules that a function refers to; also if one layer of torch's own is compiled twice."""
    first, second, third = (nn.Linear(8, 8) for _ in range(3))
    found = streamfx.verify(lambda x: third(second(first(x).tanh()).tanh()).square().mean(), torch.randn(2, 48, 8))
    assert len(found.errors) == 6 and all(found.norms.values())
    assert {"Linear.weight", "Linear(2).weight", "Linear(3).bias"} < set(found.errors)
    assert set(streamfx.verify(compiled(compiled(first)), torch.randn(2, 48, 8)).errors) == {"weight", "bias"}
