"""`memory_budget`: what a plan says is what a step takes, and no plan takes more than it may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import streamfx
import streamfx.frontend.split_graphs
from streamfx import budget
from streamfx.budget import STATE, budget_bytes, free_memory, is_budget, total_memory
from streamfx.cost.memory import cost_of
from streamfx.cost.meter import Meter
from streamfx.errors import OverBudgetError
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.options import SAVE_LEVELS, resolve_options
from streamfx.passes.partition.budget_search import held_bytes
from streamfx.passes.partition.two_sequences import where_to_split
from streamfx.runtime.outer import HostProgramRunner
from tests.support import hf
from tests.support.exactness import gradient_errors, outcome, recorder
from tests.support.hf import ROTARY
from tests.support.peaks import however_small
from tests.support.small import Causal, tokens
from tests.support.translators import Translator, batch

pytestmark = pytest.mark.compiled

LENGTH, LAYERS = 1024, 3
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": LENGTH}
CHUNKS = {"chunk_size": 128, "loss_chunk_size": 128}
CPU = torch.device("cpu")


class Step:
    """A training step of a wider model that is compiled with some options, measured as it runs."""

    def __init__(self, make: Any = hf.llama, layers: int = LAYERS, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**WIDE, "num_hidden_layers": layers}.items():
                patch.setitem(ROTARY, name, value)
            self.model = make()
        self.ids, self.backend = torch.randint(1, hf.VOCABULARY, (1, LENGTH)), recorder(**{"outputs": "lazy", **options})
        self.compiled = torch.compile(lambda ids: self.model(input_ids=ids, labels=ids).loss, backend=self.backend)

    def peak(self) -> int:
        """Bytes alive at most in a run after the first, over what was alive before."""
        for _ in range(2):  # the first one compiles
            self.model.zero_grad(set_to_none=True)
            with Meter() as meter:
                self.compiled(self.ids).backward()
        return meter.peak

    @property
    def program(self) -> Program:
        (facts,) = self.backend.facts
        assert facts.program is not None
        return facts.program

    def predicted(self) -> int:
        return cost_of(self.program.forward, self.program.backward, 1).peak

    def held(self) -> int:
        return held_bytes(self.program.forward.graph)


def peak_as_predicted(recorded: Any, program: Program | None) -> int:
    """Runs both halves on real tensors, holding nothing that the backward half frees: bytes that were alive at the peak."""
    assert program is not None and program.backward is not None
    with Meter() as meter:
        results = list(HostProgramRunner(program.forward)(list(recorded.primals)))
        saved = results[1:]
        arguments = [*saved[len(program.saved) :], *saved[: len(program.saved)], *recorded.tangents]
        del results, saved
        HostProgramRunner(program.backward)(arguments)
    assert meter.peak == pytest.approx(cost_of(program.forward, program.backward, 1).peak, rel=0.05)
    return meter.peak


@pytest.mark.long
@pytest.mark.parametrize("make", [hf.qwen3_tied, hf.gemma3], ids=lambda make: make.__name__)
def test_models_within_four_budgets(make: Any) -> None:
    """The joint graph is recorded once; programs for each level of what is kept and each budget are run on real tensors."""
    step = Step(make, outputs="dense", **CHUNKS)
    step.compiled(step.ids).backward()
    (recorded,) = step.backend.compilations
    for save in SAVE_LEVELS:
        peak_as_predicted(recorded, recorded.facts_for(resolve_options({**CHUNKS, "save": save})).program)
    with pytest.raises(OverBudgetError) as caught:
        recorded.facts_for(resolve_options({"memory_budget": 1}))
    least, free = caught.value.smallest, step.held() + step.predicted()
    for amount in (least + 4096, (least + free) // 2, int(1.2 * free), 2 * free):
        program = recorded.facts_for(resolve_options({"memory_budget": amount})).program
        assert step.held() + peak_as_predicted(recorded, program) <= amount


def handed_over(monkeypatch: pytest.MonkeyPatch, compiler: Any, **options: Any) -> tuple[float, str]:
    """The error of gradients with a budget in which everything fits and `compiler` in Inductor's place; what explain says."""
    monkeypatch.setattr("streamfx.frontend.backend.compile_whole", compiler)
    model, ids = Causal().double(), tokens(2, 11)
    options = {"memory_budget": "1GiB", "bodies": "inductor", **options}
    compiled = torch.compile(model, backend="streambp", options=options)
    truth, found = (outcome(run, model, (ids, ids)).gradients for run in (model, compiled))
    return max(gradient_errors(found, truth).values()), str(streamfx.explain(model, ids, ids, options=options))


def test_what_fits_is_given_to_inductor_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def compiler(module: Any, inputs: Any) -> Any:
        given.append(module)
        return module

    error, text = handed_over(monkeypatch, compiler)
    assert error == 0
    (module,) = given
    assert any("scaled_dot_product" in str(node.target) for node in module.graph.nodes)  # Dynamo's graph, not AOTAutograd's
    assert "nothing is cut into chunks, and Inductor compiles it" in text
    error, text = handed_over(monkeypatch, None, bodies="eager")
    assert error < 1e-12 and "Inductor" not in text and "as it stands" in text


@pytest.mark.parametrize("value", [0, -1, 1.5, 0.0, "much", "3 fish", True, "GiB"])
def test_budgets_that_are_none(value: Any) -> None:
    assert not is_budget(value) and budget_bytes("1.5 GiB", CPU) == 3 << 29 and budget_bytes("2GB", CPU) == 2 * 10**9
    with pytest.raises(streamfx.OptionError, match="memory_budget"):
        streamfx.configure(memory_budget=value)


def test_a_container_allows_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\nfile 400000\ninactive_file 200000\nactive_file 150000\nshmem 50000\n")
    assert free_memory(CPU) == 2350000
    (tmp_path / "memory.max").write_text("max\n")
    assert 2350000 < free_memory(CPU) <= total_memory(CPU)
    assert 2 * budget_bytes(0.25, CPU) == pytest.approx(budget_bytes(0.5, CPU), abs=1)


@pytest.mark.long
def test_a_budget_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fits into it with the optimizer's state runs as it stands; else it streams, and stays within."""
    whole = Step(layers=2, memory_budget="1GiB", bodies="eager")
    most, trained = whole.peak(), sum(parameter.nbytes for parameter in whole.model.parameters())
    monkeypatch.setattr(budget, "memory_of", lambda device: 0)
    for free, is_whole in ((2 * most + STATE * trained, True), (most // 2 + STATE * trained, False)):
        monkeypatch.setattr(budget, "free_on", lambda device, free=free: free)
        step = Step(layers=2, memory_budget="auto", bodies="eager")
        assert step.peak() <= free - STATE * trained
        assert (step.backend.facts[0].program is None) == is_whole


@pytest.mark.parametrize("is_translator", [True, False])
def test_that_no_split_is_tried_is_said_where_it_could_help(is_translator: bool) -> None:
    """Of a graph of two sequences, and only there; and what a step takes at least, wherever nothing fits."""
    model = Translator(layers=1) if is_translator else Causal()
    inputs = batch(96, 24) if is_translator else (tokens(1, 32), tokens(1, 32))
    with pytest.raises(OverBudgetError, match="smallest possible peak is") as caught, however_small():
        streamfx.explain(model, *inputs, memory_budget=1000, chunk_size=5)
    assert ("within one that is not tried" in str(caught.value)) == is_translator
    assert caught.value.smallest > 1000 and "parameters" in caught.value.terms and "raise the budget" in caught.value.do


def test_a_split_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each graph, also where `strict=True` asks before whether it streams in two parts."""
    looked: list[fx.Graph] = []

    def where(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
        looked.append(graph)
        return where_to_split(facts, graph, peak)

    monkeypatch.setattr(streamfx.frontend.split_graphs, "where_to_split", where)
    run = torch.compile(Translator(layers=1), backend="streambp", options={"bodies": "eager", "chunk_size": 5, "strict": True})
    with however_small():
        run(*batch(96, 24))
    assert looked and len(looked) == len(set(looked))
