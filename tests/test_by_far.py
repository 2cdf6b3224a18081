"""What fits into the budget by far is told from Dynamo's graph: not of a step that takes more, not of what nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import streamfx
from streamfx.cost.meter import Meter
from streamfx.frontend.quick_bound import find_fitting_lengths, max_activation_bytes
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.tools.report.fallback_reasons import FITS
from tests.random_decoders.checking import executed
from tests.random_decoders.kinds import numbered
from tests.support.exactness import gradient_errors, outcome, scalar_of
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled

IDS = tokens(2, 32)


def asked(model: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[fx.Graph, Lengths | None]]:
    """Dynamo's graphs of a call, and for which lengths each fits by far."""
    said: list[tuple[fx.Graph, Lengths | None]] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        said.append((module.graph, find_fitting_lengths(module.graph, inputs, "1GiB")))
        return module

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*args, **kwargs)
    return said


def assert_bounded(model: nn.Module, **inputs: Any) -> int:
    """Eager, which keeps the most, stays below what is said of all graphs of a call; how many were told of."""
    graphs = [max_activation_bytes(graph) for graph, _ in asked(model, **inputs)]
    with Meter() as meter:
        scalar_of(model(**inputs)).backward()
    known = [each for each in graphs if each is not None]
    if len(known) == len(graphs):
        assert meter.peak <= sum(known) + sum(parameter.nbytes for parameter in model.parameters())
    return len(known)


@pytest.mark.long
def test_random_decoders_stay_below() -> None:
    programs = [executed(numbered(number)) for number in range(120)]
    assert sum(assert_bounded(names["model"], **names["inputs"]) for names in programs) >= 30


def test_attention_counts_all_pairs() -> None:
    """Without a fused kernel, attention makes weights for all rows and keys."""
    assert assert_bounded(Causal(), ids=IDS, labels=IDS) == 1
    short, long = (asked(Causal(), tokens(1, n), tokens(1, n))[0][0] for n in (64, 640))
    assert (max_activation_bytes(long) or 0) > 50 * (max_activation_bytes(short) or 1)


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


@pytest.mark.parametrize("run", [Owned.apply, own_operator, lambda x: x[x > 0].exp()], ids=["function", "operator", "count"])
def test_what_is_the_users_own_is_not_known(run: Callable[[Tensor], Tensor]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        said = asked(lambda x: run(x).sum(), torch.randn(3, 5, requires_grad=True))
    assert said and all(found is None for _, found in said)


def test_layers_over_steps_are_not_known() -> None:
    """They keep what each step makes."""

    def steps(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return torch.lstm(x, (x.new_zeros(1, 1, 3),) * 2, [one, other], False, 1, 0.0, False, False, True)[0]

    assert max_activation_bytes(fx.symbolic_trace(steps).graph) is None


def test_another_length_fits_as_far_as_it_was_asked_about() -> None:
    """A plan for lengths that change holds for some lengths: beyond them, a call is compiled again, and streams if it must."""
    runs: list[Lengths | None] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        runs.append(found := find_fitting_lengths(module.graph, inputs, "40MiB"))
        if found:
            found.guard(module.graph)
        return module

    step = torch.compile(Causal(), backend=backend, dynamic=True)
    for length in (16, 20, 1024):
        step(tokens(2, length), tokens(2, length))
    assert len(runs) == 2 and runs[0] and runs[1] is None
    assert 20 <= max(runs[0].numbers.values()) < 1024


@pytest.fixture
def given_to_inductor(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that a stand-in for Inductor got."""
    given: list[Any] = []

    def compiler(module: Any, inputs: Any) -> Any:
        given.append(module)
        return module

    monkeypatch.setattr("streamfx.frontend.backend.compile_whole", compiler)
    return given


@pytest.mark.parametrize(
    ("budget", "options", "found"),
    [
        ("1GiB", {}, FITS),
        ("1GiB", {"bodies": "eager"}, FITS),
        ("1GiB", {"chunk_size": 16}, "streams"),
        ("30KiB", {}, "streams"),
    ],
    ids=["compiled", "no compiler", "chunks", "no room"],
)
def test_a_short_step_is_not_analysed_and_who_asks_for_something_else_gets_it(
    monkeypatch: pytest.MonkeyPatch, given_to_inductor: list[Any], budget: Any, options: Any, found: str
) -> None:
    is_compiled = budget == "1GiB" and not options
    if is_compiled:
        monkeypatch.setattr("streamfx.frontend.backend.aot_autograd", None)
    model = Causal().double()
    truth = outcome(model, model, (IDS, IDS)).gradients
    done = streamfx.enable(model, memory_budget=budget, **options)
    own = outcome(model, model, (IDS, IDS)).gradients
    streamfx.disable(model)
    assert max(gradient_errors(own, truth).values()) < 1e-12
    assert len(given_to_inductor) == is_compiled and found in str(done)
    assert ("Inductor compiles it" in str(done)) or not is_compiled


def test_evaluation_within_a_budget_is_compiled_as_it_stands_and_explain_looks_at_all_of_it(given_to_inductor: list[Any]) -> None:
    step = torch.compile(Causal(), backend="streambp", options={"memory_budget": "1GiB"})
    with torch.no_grad():
        step(IDS, IDS)
    assert len(given_to_inductor) == 1
    assert FITS in str(streamfx.explain(Causal(), IDS, IDS, memory_budget="1GiB"))
