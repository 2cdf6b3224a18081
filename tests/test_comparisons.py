"""What `streamfx.explain` compares a call with is that, and what it says of loops is true of what is in them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.tools.report.verdict import GAIN, LITTLE
from tests.support.small import WIDTH, Causal, Mixing, tokens
from tests.test_explain import Layer, rows, summary_of

IDS = tokens(2, 6)
ROOT = Path(__file__).parent.parent


class Stacked(nn.Module):
    """Layers, held in one way or another."""

    def __init__(self, layers: nn.Module, is_used: bool = True) -> None:
        super().__init__()
        self.layers, self.before, self.is_used = layers, Layer(), is_used

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers.children() if self.is_used else ():
            x = layer(x)
        return x.square().mean()


class Sorting(Layer):
    """The same operator, at two lines."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = x.sort(1).values + x
        return x.sigmoid().sort(1).values + x


HELD: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: Stacked(nn.ModuleList([Layer(), Layer()])),
    "dict": lambda: Stacked(nn.ModuleDict({"first": Layer(), "second": Layer()})),
    "sequence": lambda: Stacked(nn.Sequential(Layer(), Layer())),
    "around": lambda: nn.Sequential(Stacked(nn.ModuleList([Layer(), Layer()]))),
    "one in a sequence": lambda: Stacked(nn.Sequential(Layer())),
    "one in a dict": lambda: Stacked(nn.ModuleDict({"only": Layer()})),
}


@pytest.mark.long
def test_layers_are_checkpointed_however_they_are_held() -> None:
    peaks = {name: summary_of(made(), rows(64), chunk_size=16)["checkpointing_peak_bytes"] for name, made in HELD.items()}
    assert peaks["list"] == peaks["dict"] == peaks["sequence"] == peaks["around"]
    assert peaks["one in a sequence"] == peaks["one in a dict"] not in (None, peaks["list"])


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


NOT_CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "layers that were found in the model are not called": lambda: Stacked(nn.ModuleList([Layer(), Layer()]), is_used=False),
    "no list of layers was found": lambda: Stacked(nn.Identity()),
    "no list of layers": lambda: Stacked(nn.ModuleDict({"one": nn.Identity(), "other": Layer()})),
    "nothing is trained in this call": lambda: frozen(HELD["list"]()),
}


@pytest.mark.parametrize(("why", "made"), NOT_CHECKPOINTED.items(), ids=NOT_CHECKPOINTED)
def test_what_is_not_checkpointing_is_not_called_so(why: str, made: Callable[[], nn.Module]) -> None:
    found = streamfx.explain(made(), rows(64), chunk_size=16)
    summary = found.summary()
    assert summary["checkpointing_peak_bytes"] is None and why in summary["not_checkpointed"]
    assert "gradient checkpointing" not in str(found).splitlines()[0]
    assert f"not compared with gradient checkpointing: {summary['not_checkpointed']}" in str(found)
    assert "gradient checkpointing" not in found.curves()


def test_where_nothing_is_trained_nothing_is_said_of_this_length() -> None:
    found = streamfx.explain(frozen(nn.Linear(WIDTH, WIDTH)), rows(64), chunk_size=64)
    assert "nothing is trained in this call" in str(found).splitlines()[0]
    assert "at this length" not in str(found) and not found.summary()["trains"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compute_without_gradients_is_compared_with_that_of_eager(mode: Callable[[], Any]) -> None:
    with mode():
        summary = summary_of(Causal(), IDS, IDS)
    assert summary["flops"] == summary["baseline_flops"] > 0
    assert not summary["trains"] and summary["checkpointing_flops"] is None


@pytest.mark.parametrize("ids", [IDS[:, :0], IDS[:0]], ids=["length", "batch"])
def test_of_nothing_there_is_nothing_to_say(ids: Tensor) -> None:
    with pytest.raises(streamfx.NotTracedError, match=r"(?s)input \[0\] of shape .*, and no products.*at least one"):
        streamfx.explain(Causal(), ids, ids)
    with pytest.raises(streamfx.NotComparableError, match=r"(?s)input \[0\] of shape .*nothing was compared.*at least one"):
        streamfx.verify(Causal(), ids, ids)


@pytest.mark.parametrize("factor", [0.0, math.nan])
def test_numbers_that_say_nothing_are_no_verdict(factor: float) -> None:
    model = Causal()
    with pytest.raises(streamfx.NotComparableError, match=r"zero or not a number: nothing was compared"):
        streamfx.verify(lambda ids: model(ids, ids) * factor, IDS)


SEVERAL = """
import threading
import torch
import streamfx
from streamfx.tools.report.verdict import GAIN, LITTLE
from tests.support.small import Causal

ids = torch.arange(24).reshape(2, 12) % 10
said = set()

def look(model):
    said.add((str(streamfx.explain(model, ids, ids, chunk_size=4)), streamfx.verify(model, ids, ids, chunk_size=4).ok))

look(Causal())
threads = [threading.Thread(target=look, args=(Causal(),)) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(said), {ok for _, ok in said})
"""


def test_several_threads_may_look_at_once() -> None:
    """In a process of its own: it ended by a signal before they took turns."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SEVERAL], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "1 {True}"


def test_nothing_beside_something_is_compared() -> None:
    """As a state that a call begins without."""
    layer = nn.Linear(WIDTH, WIDTH)
    found = streamfx.verify(lambda x, before: layer(torch.cat([before, x], 1)).square().mean(), rows(), rows()[:, :0])
    assert found.ok and found.max_error < 1e-4


def test_chunks_are_no_longer_than_the_sequence() -> None:
    found = streamfx.explain(Causal(), IDS, IDS, chunk_size=10**6, loss_chunk_size=10**6)
    assert {stage.chunk_size for stage in found.stages} == {6}
    assert {run.rows for stage in found.stages for run in stage.runs} == {6}


class Strided(nn.Module):
    """All products are made of every second row, which is little beside what is made of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.wide = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(256))

    def forward(self, x: Tensor) -> Tensor:
        summed = x.cumsum(1)
        return self.layer(summed[:, ::2]).square().mean() + (summed[..., None] * self.wide).sin().sum()


def test_that_a_stage_streams_is_said_of_what_is_in_loops() -> None:
    """A share that is not all is said beside it, and a stage without a loop runs whole."""
    found = streamfx.explain(Strided(), rows(64)[:1], chunk_size=4)
    assert found.summary()["streamed_flops_share"] == 0.0
    assert "every stage streams in part: 0.0 % of the FLOPs are in loops;" in str(found)
    assert "every stage streams;" in str(streamfx.explain(Causal(), IDS, IDS, chunk_size=4))
    for model, given in ((Causal(), (IDS[:, :1], IDS[:, :1])), (Mixing(), (rows(),)), (nn.Linear(WIDTH, WIDTH), (rows()[0, 0],))):
        stages = streamfx.explain(model, *given, chunk_size=4).stages
        assert all(stage.loops or stage.reasons for stage in stages)


HEADLINES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Any]]] = {
    "streams": (Causal, (tokens(2, 64), tokens(2, 64)), {"chunk_size": 16}),
    "fits as it stands": (Causal, (tokens(2, 64), tokens(2, 64)), {"memory_budget": "1G", "bodies": "eager"}),
    "in part": (Mixing, (rows(),), {"chunk_size": 4}),
    "nothing": (lambda: nn.Linear(WIDTH, WIDTH), (rows()[0, 0],), {}),
    "layers": (HELD["list"], (rows(64),), {"chunk_size": 16}),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_is_computed_from_the_figures_below_it(name: str) -> None:
    """A gain is told where the figures show one, whatever streams, and no stage runs whole all of whose work is in loops."""
    made, given, options = HEADLINES[name]
    found = streamfx.explain(made(), *given, options=options)
    summary, (first, second, *_) = found.summary(), str(found).splitlines()
    other = summary["checkpointing_peak_bytes"] or summary["baseline_peak_bytes"]
    less = other / summary["peak_bytes"]
    assert ("less memory" in first) == (less >= GAIN)
    assert ("no gain" in first) == (1 / GAIN < less < LITTLE)
    assert ("times as much" in first) == (less <= 1 / GAIN)
    assert ("nothing streams" in first) == (not any(stage.loops for stage in found.stages))
    assert not any(stage.loops for stage in found.stages) or "run whole" not in second
    assert all(stage.loops for stage in found.stages) or summary["streamed_flops_share"] < 1
    shown = f"{min(100 * summary['streamed_flops_share'], 100):.1f} % of it in loops"
    assert shown in str(found)


def test_a_reason_is_told_once_with_all_that_it_holds_for() -> None:
    found = str(streamfx.explain(Stacked(nn.ModuleList([Sorting(), Sorting()])), rows(12), chunk_size=4))
    assert found.count("mixes the rows of the sequence") == 1
    assert found.count("puts rows by number") == 1
    _, whole = found.split("this runs whole between loops, the rest streams:", 1)
    assert whole.count("test_comparisons.py:") == 4  # both lines, of the sort and of its gradient


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor


def test_an_object_of_the_users_own_is_an_output_as_a_tuple_is() -> None:
    """What comes out of it is followed back, in eager and with checkpoints, too."""

    class Returning(Causal):
        def __init__(self, kind: Callable[..., Any]) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            loss = super().forward(ids, labels)
            return self.kind(loss, loss * 2)

    def found(kind: Callable[..., Any]) -> Any:
        return streamfx.explain(Returning(kind), IDS, IDS, chunk_size=2, outputs="dense").summary()

    names = ("baseline_peak_bytes", "baseline_flops", "peak_bytes", "flops")
    own, plain = found(Output), found(lambda loss, hidden: (loss, hidden))
    assert [own[name] for name in names] == [plain[name] for name in names]
