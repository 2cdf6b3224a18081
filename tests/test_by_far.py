"""What fits into the budget by far is told from Dynamo's graph: not of a step that takes more, not of what nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import streamfx
from streamfx.cost.meter import Meter
from streamfx.frontend.quick_bound import bytes_at_most, fits_by_far
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.tools.report.fallback_reasons import FITS
from tests.random_decoders.checking import executed
from tests.random_decoders.kinds import numbered
from tests.support import hf
from tests.support.exactness import gradient_errors, outcome, scalar_of
from tests.support.small import Causal, tokens
from tests.support.spread import spread

IDS = tokens(2, 32)
Said = list[tuple[fx.Graph, Lengths | None]]


def asked(model: Callable[..., Any], *args: Any, budget: int | str = "1GiB", **kwargs: Any) -> Said:
    """Dynamo's graphs of a call, and for which lengths each fits by far."""
    said: Said = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        said.append((module.graph, fits_by_far(module.graph, inputs, budget)))
        return module

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*args, **kwargs)
    return said


def assert_bounded(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Eager, which keeps the most, stays below what is said of all graphs of a call; how many were told of."""
    graphs = [bytes_at_most(graph) for graph, _ in asked(model, *args, **kwargs)]
    with Meter() as meter:
        scalar_of(model(*args, **kwargs)).backward()
    known = [each for each in graphs if each is not None]
    if len(known) == len(graphs):
        assert meter.peak <= sum(known) + sum(parameter.nbytes for parameter in model.parameters())
    return len(known)


@pytest.mark.long
@pytest.mark.parametrize("first", spread(range(0, 120, 20), 3))
def test_random_decoders_stay_below(first: int) -> None:
    told = 0
    for number in range(first, first + 20):
        names = executed(numbered(number))
        told += assert_bounded(names["model"], **names["inputs"])
    assert told >= 5


@pytest.mark.parametrize("make", [hf.llama, hf.gpt2], ids=lambda make: make.__name__)
def test_models_stay_below(make: Callable[[], nn.Module]) -> None:
    ids = torch.randint(1, hf.VOCABULARY, (2, 40))
    assert assert_bounded(make(), input_ids=ids, labels=ids) == 1


def test_attention_counts_all_pairs() -> None:
    """Without a fused kernel, attention makes weights for all rows and keys."""
    short, long = (asked(Causal(), tokens(1, n), tokens(1, n))[0][0] for n in (64, 640))
    assert (bytes_at_most(long) or 0) > 50 * (bytes_at_most(short) or 1)


class Steps(nn.Module):
    """A layer over steps, which keeps what each of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(12, n) for n in (3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lstm(x, (x.new_zeros(1, 1, 3),) * 2, list(self.weights), False, 1, 0.0, False, False, True)[0]


class Owned(torch.autograd.Function):
    """The user's own gradient, which may keep anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.expand(1000, *x.shape).clone())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@torch.library.custom_op("streamfx_tests::by_far", mutates_args=())
def own_operator(x: Tensor) -> Tensor:
    return x * 2


own_operator.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    "run", [Owned.apply, own_operator, lambda x: x[x > 0].exp()], ids=["function", "operator", "count of data"]
)
def test_what_is_the_users_own_is_not_known(run: Callable[[Tensor], Tensor]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        said = asked(lambda x: run(x).sum(), torch.randn(3, 5, requires_grad=True))
    assert said and all(found is None for _, found in said)


def test_layers_over_steps_are_not_known() -> None:
    graph = fx.symbolic_trace(Steps()).graph
    assert bytes_at_most(graph) is None


def test_another_length_fits_as_far_as_it_was_asked_about() -> None:
    """A plan for lengths that change holds for some lengths: beyond them, a call is compiled again, and streams if it must."""
    model, runs = Causal(), []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found = fits_by_far(module.graph, inputs, "40MiB")
        runs.append(found)
        if found:
            found.guard(module.graph)
        return module

    step = torch.compile(model, backend=backend, dynamic=True)
    for length in (16, 20, 1024):
        ids = tokens(2, length)
        step(ids, ids)
    assert len(runs) == 2 and runs[0] and runs[1] is None
    assert 20 <= max(runs[0].numbers.values()) < 1024


def compiled_by(
    monkeypatch: pytest.MonkeyPatch, budget: Any, model: nn.Module | None = None, **options: Any
) -> tuple[list[Any], str]:
    """Graphs that Inductor's stand-in got, and what the step's one line says; gradients are those of eager."""
    given: list[Any] = []

    def compiler(module: Any, inputs: Any) -> Any:
        given.append(module)
        return module

    monkeypatch.setattr("streamfx.frontend.backend.compile_whole", compiler)
    model = model or Causal().double()
    truth = outcome(model, model, (IDS, IDS)).gradients
    done = streamfx.enable(model, memory_budget=budget, **options)
    found = outcome(model, model, (IDS, IDS)).gradients
    streamfx.disable(model)
    assert max(gradient_errors(found, truth).values()) < 1e-12
    return given, str(done)


def test_a_short_step_is_not_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfx.frontend.backend.aot_autograd", None)
    given, line = compiled_by(monkeypatch, "1GiB")
    assert len(given) == 1 and FITS in line and "Inductor compiles it" in line


@pytest.mark.parametrize(
    ("budget", "options", "found"),
    [
        ("1GiB", {"bodies": "eager"}, FITS),
        ("1GiB", {"chunk_size": 16}, "streams"),
        ("30KiB", {}, "streams"),
        (None, {}, "streams"),
    ],
    ids=["no compiler", "chunks", "no room", "no budget"],
)
def test_who_asks_for_something_else_gets_it(monkeypatch: pytest.MonkeyPatch, budget: Any, options: Any, found: str) -> None:
    given, line = compiled_by(monkeypatch, budget, **options)
    assert given == [] and found in line


def test_explain_looks_at_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FITS in str(streamfx.explain(Causal(), IDS, IDS, memory_budget="1GiB"))


def test_evaluation_within_a_budget_is_compiled_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def compiler(module: Any, inputs: Any) -> Any:
        given.append(module)
        return module

    monkeypatch.setattr("streamfx.frontend.backend.compile_whole", compiler)
    step = torch.compile(Causal(), backend="streambp", options={"memory_budget": "1GiB"})
    with torch.no_grad():
        step(IDS, IDS)
    assert len(given) == 1
