"""`memory_budget`: the predicted peak is the measured peak, and never exceeds the budget; levels; amounts as text."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import streamfx
import streamfx.frontend.split_graphs
from streamfx import budget
from streamfx.budget import (
    STATE_PER_PARAMETER,
    UNITS,
    budget_bytes,
    format_bytes,
    free_memory,
    is_budget,
    parse_amount,
    total_memory,
)
from streamfx.cost.memory import cost_of
from streamfx.cost.meter import Meter
from streamfx.errors import OverBudgetError
from streamfx.frontend.quick_bound import find_fitting_lengths, max_activation_bytes
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, known
from streamfx.options import SAVE_LEVELS, resolve_options
from streamfx.tools.report.fallback_reasons import FITS
from tests.random_decoders.checking import executed
from tests.random_decoders.kinds import numbered
from tests.support import hf
from tests.support.budgets import Step
from tests.support.calls import noted
from tests.support.exactness import compare, gradient_errors, outcome, scalar_of
from tests.support.hf import LossOf, deep
from tests.support.peaks import however_small
from tests.support.small import Causal, tokens
from tests.support.translators import Translator, batch

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")


def test_free_memory_respects_the_container_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\nfile 400000\ninactive_file 200000\nactive_file 150000\nshmem 50000\n")
    assert free_memory(CPU) == 2350000
    (tmp_path / "memory.max").write_text("max\n")
    assert 2350000 < free_memory(CPU) <= total_memory(CPU)
    assert 2 * budget_bytes(0.25, CPU) == pytest.approx(budget_bytes(0.5, CPU), abs=1)


@pytest.mark.long
def test_an_automatic_budget_is_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fits with the optimizer's state runs unchanged; else it streams and stays within the budget."""
    whole = Step(layers=2, memory_budget="1GiB", bodies="eager")
    most, trained = whole.peak(), sum(parameter.nbytes for parameter in whole.model.parameters())
    monkeypatch.setattr(budget, "total_memory", lambda device: 0)
    for free, is_whole in ((2 * most + STATE_PER_PARAMETER * trained, True), (most // 2 + STATE_PER_PARAMETER * trained, False)):
        monkeypatch.setattr(budget, "free_memory", lambda device, free=free: free)
        step = Step(layers=2, memory_budget="auto", bodies="eager")
        assert step.peak() <= free - STATE_PER_PARAMETER * trained
        assert (step.backend.facts[0].program is None) == is_whole


@pytest.mark.parametrize("is_translator", [True, False])
def test_the_error_mentions_a_split_only_if_it_could_help(is_translator: bool) -> None:
    """Only a graph with two sequences mentions a split; each error names the smallest possible peak."""
    model = Translator(layers=1) if is_translator else Causal()
    inputs = batch(96, 24) if is_translator else (tokens(1, 32), tokens(1, 32))
    with pytest.raises(OverBudgetError, match="smallest possible peak is") as caught, however_small():
        streamfx.explain(model, *inputs, memory_budget=1000, chunk_size=5)
    assert ("does not try that" in str(caught.value)) == is_translator
    assert caught.value.smallest > 1000 and "parameters" in caught.value.terms and "raise the budget" in caught.value.do


def test_each_graph_is_searched_for_a_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each graph, also where `strict=True` asks before whether it streams in two parts."""
    searched = noted(monkeypatch, streamfx.frontend.split_graphs, "find_split", lambda facts, graph, peak: graph)
    run = torch.compile(Translator(layers=1), backend="streambp", options={"bodies": "eager", "chunk_size": 5, "strict": True})
    with however_small():
        run(*batch(96, 24))
    assert searched and len(searched) == len(set(searched))


# -- graphs that clearly fit into the budget are not analyzed

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
    """Assert that eager's peak stays below the bounds of a call's graphs; return the number of bounds."""
    graphs = [max_activation_bytes(graph) for graph, _ in asked(model, **inputs)]
    with Meter() as meter:
        scalar_of(model(**inputs)).backward()
    known = [each for each in graphs if each is not None]
    if len(known) == len(graphs):
        assert meter.peak <= sum(known) + sum(parameter.nbytes for parameter in model.parameters())
    return len(known)


@pytest.mark.long
def test_random_decoders_stay_below_the_quick_bound() -> None:
    programs = [executed(numbered(number)) for number in range(120)]
    assert sum(assert_bounded(names["model"], **names["inputs"]) for names in programs) >= 30


def test_the_quick_bound_counts_all_pairs_of_attention() -> None:
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
def test_custom_operators_have_no_quick_bound(run: Callable[[Tensor], Tensor]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        said = asked(lambda x: run(x).sum(), torch.randn(3, 5, requires_grad=True))
    assert said and all(found is None for _, found in said)


def test_an_lstm_has_no_quick_bound() -> None:

    def steps(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return torch.lstm(x, (x.new_zeros(1, 1, 3),) * 2, [one, other], False, 1, 0.0, False, False, True)[0]

    assert max_activation_bytes(fx.symbolic_trace(steps).graph) is None


def test_a_quick_bound_holds_up_to_a_length() -> None:
    """Beyond that length, a call is compiled anew, and streams if it has to."""
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

    monkeypatch.setattr("streamfx.frontend.backend.compile_dynamo_graph", compiler)
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
def test_a_step_that_clearly_fits_is_not_analyzed_unless_chunks_are_requested(
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


def test_evaluation_that_clearly_fits_is_compiled_unchanged(given_to_inductor: list[Any]) -> None:
    step = torch.compile(Causal(), backend="streambp", options={"memory_budget": "1GiB"})
    with torch.no_grad():
        step(IDS, IDS)
    assert len(given_to_inductor) == 1
    assert FITS in str(streamfx.explain(Causal(), IDS, IDS, memory_budget="1GiB"))


# -- levels of saved values


def loops_again(facts: Facts) -> int:
    return sum("_again" in loop.spec.name for loop in known(facts.program).loops)


def test_each_level_saves_more_and_recomputes_less() -> None:
    """Values of the first layer, batch 1: each level also saves the values of the level before it."""
    ids = torch.randint(1, hf.VOCABULARY, (1, 12))
    model = LossOf(deep(hf.qwen3, 2))
    (recorded,) = compare(model, {"input_ids": ids, "labels": ids}, chunk_size=6).recorder.compilations
    chunks = {"chunk_size": 6, "loss_chunk_size": 6}
    facts = [recorded.facts_for(resolve_options({"save": save, **chunks})) for save in SAVE_LEVELS]
    kept = [{node.name: tuple(node.meta["val"].shape) for node in own.plan.kept[0]} for own in facts]
    assert all(less.items() < more.items() for less, more in pairwise(kept))
    shapes = [sorted(more[name] for name in more.keys() - less.keys()) for less, more in pairwise(kept)]
    keys, queries, inner = hf.KEY_HEADS * hf.HEAD, hf.HEADS * hf.HEAD, hf.ROTARY["intermediate_size"]
    assert shapes[0] == [(1, hf.HEADS, 12), (1, hf.HEADS, 12, hf.HEAD)]
    assert shapes[1] == sorted([(12, keys), (12, keys), (12, queries), (1, 12, hf.WIDTH)])
    assert shapes[2] == [(12, inner), (12, inner)]
    costs = [cost_of(own.program.forward, own.program.backward, 1) for own in facts if own.program is not None]
    assert all(less.flops > more.flops and less.held < more.held for less, more in pairwise(costs))
    every = [recorded.facts_for(resolve_options({"keep_every": number, **chunks})) for number in (1, 2, 9)]
    assert [loops_again(own) for own in every] == [0, 1, 1]
    assert [len(known(every[0].program).saved) - len(known(own.program).saved) for own in every] == [0, 1, 1]


# -- amounts of memory, as text or numbers

SPACES = st.text(" \t", max_size=2)


@given(st.data(), st.integers(1, 1 << 70), st.sampled_from(sorted(UNITS)))
def test_every_unit_parses_exactly(data: st.DataObject, number: int, unit: str) -> None:
    written = "".join(data.draw(st.sampled_from((label.lower(), label.upper()))) for label in unit)
    text = "".join((data.draw(SPACES), str(number), data.draw(SPACES), written, data.draw(SPACES)))
    assert parse_amount(text) == budget_bytes(text, CPU) == number * UNITS[unit] and isinstance(parse_amount(text), int)
    assert resolve_options({"memory_budget": text}).memory_budget == text


@given(st.integers(1, 1 << 60))
def test_printed_sizes_parse_back(size: int) -> None:
    amount = parse_amount(format_bytes(size))
    assert isinstance(amount, int) and abs(amount - size) <= size / 20


@given(st.integers(1, 10000))
def test_percentages_equal_fractions(hundredths: int) -> None:
    share, written = hundredths / 10000, f"{hundredths // 100}.{hundredths % 100:02}"
    shares = [parse_amount(share), parse_amount(f"{written}%"), parse_amount(f"{written} %"), parse_amount(f"{share:.4f}")]
    assert shares == [share] * 4 and all(isinstance(item, float) for item in shares)
    assert budget_bytes(f"{written}%", CPU) == int(share * total_memory(CPU))


TEXTS = ("", "G", "-1G", "24 X", "24GiBi", "24i", "1,5G", "0", "0GiB", "0%", "101%", "1.5", "0.0", "nan", "inf", "1e9", "٣G")


@pytest.mark.parametrize("value", [*TEXTS, 0, -1, 0.0, 1.5, -0.5, float("nan"), float("inf"), True, (), b"24G"])
def test_invalid_amounts_are_refused(value: Any) -> None:
    assert parse_amount(value) is None and not is_budget(value)
    with pytest.raises(streamfx.OptionError, match="24G") as error:
        streamfx.configure(memory_budget=value)
    assert repr(value) in str(error.value)
    with pytest.raises(streamfx.PlanError, match="memory cannot be"):
        streamfx.plan("Qwen3-8B", memory=value)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction])
def test_numbers_of_any_type_are_shares(kind: Any) -> None:
    assert is_budget(kind(0.5)) and not is_budget(kind(1.5))
    for asked in (streamfx.Options(memory_budget=kind(0.5)), resolve_options({"memory_budget": kind(0.5)})):
        assert asked.memory_budget == 0.5 and type(asked.memory_budget) is float


@given(st.text(max_size=12))
def test_any_text_parses_to_an_amount_or_none(text: str) -> None:
    amount = parse_amount(text)
    assert amount is None or amount > 0
    assert is_budget(text) == (amount is not None or text == "auto")


@pytest.mark.parametrize("value", ["90%", 0.9, "auto"])
def test_host_memory_must_be_bytes(value: Any) -> None:
    with pytest.raises(streamfx.PlanError, match="host_memory cannot be"):
        streamfx.plan("Qwen3-8B", host_memory=value)
