"""`memory_budget`: what a plan says is what a step takes, and no plan takes more than it may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import streamfx
import streamfx.frontend.split_graphs
from streamfx import budget
from streamfx.budget import STATE, bytes_of, free_on, is_budget, memory_of
from streamfx.cost.memory import cost_of
from streamfx.cost.meter import Meter
from streamfx.errors import OverBudgetError
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.options import SAVE_LEVELS, resolved
from streamfx.passes.partition.budget_search import held_bytes
from streamfx.passes.partition.two_sequences import where_to_split
from streamfx.runtime.outer import OuterRunner
from tests.support import hf
from tests.support.exactness import gradient_errors, outcome
from tests.support.hf import ROTARY
from tests.support.peaks import however_small
from tests.support.small import Causal, tokens
from tests.support.spread import only
from tests.support.translators import Translator, batch

LENGTH, LAYERS = 1024, 3
OFFLOADED = ({"offload": "inputs"}, {"offload": "attention"})
WIDE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": LENGTH,
}


def model_of(make: Any = hf.llama, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    before = dict(ROTARY)
    ROTARY.update(WIDE, num_hidden_layers=layers)
    try:
        return make()
    finally:
        ROTARY.clear()
        ROTARY.update(before)


class Step:
    """A training step that is compiled with some options, measured as it runs."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        from tests.support.exactness import recorder

        torch._dynamo.reset()
        self.model, self.ids = model, torch.randint(1, hf.VOCABULARY, (1, LENGTH))
        self.backend = recorder(**{"outputs": "lazy", **options})
        self.compiled = torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, backend=self.backend)

    def peak(self) -> int:
        """Bytes alive at most in a run after the first, over what was alive before."""
        for _ in range(2):  # the first one compiles
            self.model.zero_grad(set_to_none=True)
            with Meter() as meter:
                self.compiled(self.ids).backward()
        return meter.peak

    def predicted(self) -> int:
        (facts,) = self.backend.facts
        return cost_of(facts.program.forward, facts.program.backward, 1).peak  # type: ignore[union-attr]

    def held(self) -> int:
        return held_bytes(self.backend.facts[0].program.forward.graph)  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize("make", [hf.qwen3_tied], ids=lambda make: make.__name__)
def test_the_predicted_peak_is_the_measured_one(make: Any) -> None:
    """Without a budget, and within one that asks for other chunks."""
    free = Step(model_of(make, 2), chunk_size=128, loss_chunk_size=128)
    assert free.peak() == pytest.approx(free.predicted(), rel=0.05)
    amount = int(1.6 * (free.held() + free.predicted()))
    step = Step(model_of(make, 2), memory_budget=amount)
    peak = step.peak()
    assert peak == pytest.approx(step.predicted(), rel=0.05)
    assert free.held() + free.predicted() < step.held() + peak <= amount


@pytest.mark.parametrize("choice", only([], [{"keep_every": 2}, *OFFLOADED]), ids=str)
def test_what_takes_less_memory_takes_what_is_predicted(choice: dict[str, Any]) -> None:
    step = Step(model_of(), chunk_size=128, loss_chunk_size=128, **choice)
    assert step.peak() == pytest.approx(step.predicted(), rel=0.05)


def test_what_fits_is_left_as_it_stands() -> None:
    step = Step(model_of(), memory_budget="1GiB", bodies="eager")
    step.peak()
    (facts,) = step.backend.facts
    assert facts.program is None
    assert (
        "as it stands" in streamfx.explain(step.model, input_ids=step.ids, options={"memory_budget": "1GiB"}).stages[0].reasons[0]
    )


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
    assert len(given) == 1
    assert any("scaled_dot_product" in str(node.target) for node in given[0].graph.nodes)  # Dynamo's graph, not AOTAutograd's
    assert "nothing is cut into chunks, and Inductor compiles it" in text
    error, text = handed_over(monkeypatch, None, bodies="eager")
    assert error < 1e-12
    assert "Inductor" not in text


def test_what_inductor_cannot_compile_runs_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    with caplog.at_level("WARNING", logger="streamfx"):
        error, _ = handed_over(monkeypatch, fails)
    assert error < 1e-12
    assert [record.getMessage() for record in caplog.records if "no compiler here" in record.getMessage()] != []
    assert len(caplog.records) == 1


@pytest.mark.long
def test_inductor_makes_of_it_what_it_makes_without_us() -> None:
    model, ids = Causal().double(), tokens(2, 11)
    alone = torch.compile(model, backend="inductor")
    within = torch.compile(model, backend="streambp", options={"memory_budget": "1GiB", "bodies": "inductor"})
    truth, found = (outcome(run, model, (ids, ids)).gradients for run in (alone, within))
    assert max(gradient_errors(found, truth).values()) == 0


def test_what_does_not_fit_says_how_much_it_takes() -> None:
    model, ids = model_of(layers=1), torch.randint(1, hf.VOCABULARY, (1, LENGTH // 8))
    with pytest.raises(streamfx.OverBudgetError, match="smallest possible peak is") as caught:
        streamfx.explain(model, input_ids=ids, labels=ids, options={"memory_budget": "300KiB", "keep_every": 1, "save": "inputs"})
    assert "parameters" in str(caught.value)
    assert caught.value.smallest > 300 << 10
    with pytest.raises(streamfx.OverBudgetError, match="smallest possible peak is"):
        Step(model, memory_budget="300KiB", keep_every=1, save="inputs").peak()


@pytest.mark.parametrize("value", [0, -1, 1.5, 0.0, "much", "3 fish", True, "GiB"])
def test_budgets_that_are_none(value: Any) -> None:
    assert not is_budget(value)
    with pytest.raises(streamfx.OptionError, match="memory_budget"):
        streamfx.configure(memory_budget=value)


def test_budgets() -> None:
    cpu = torch.device("cpu")
    assert bytes_of("1.5 GiB", cpu) == 3 << 29
    assert bytes_of("2GB", cpu) == 2 * 10**9
    assert bytes_of(5, cpu) == 5
    assert 2 * bytes_of(0.25, cpu) == pytest.approx(bytes_of(0.5, cpu), abs=1)
    assert bytes_of(1.0, cpu) > 1 << 28


def test_what_is_free() -> None:
    """Neither nothing nor more than there is, here and in a container of less."""
    cpu = torch.device("cpu")
    assert 1 << 20 < free_on(cpu) <= memory_of(cpu)


def test_a_container_allows_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\nfile 400000\ninactive_file 200000\nactive_file 150000\nshmem 50000\n")
    assert free_on(torch.device("cpu")) == 2350000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_on(torch.device("cpu")) > 2000000


def test_a_budget_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fits into it with the optimizer's state runs as it stands; else it streams, and stays within."""
    whole = Step(model_of(layers=2), memory_budget="1GiB", bodies="eager")
    most = whole.peak()
    trained = sum(parameter.nbytes for parameter in whole.model.parameters())
    monkeypatch.setattr(budget, "memory_of", lambda device: 0)
    for free, is_whole in ((2 * most + STATE * trained, True), (most // 2 + STATE * trained, False)):
        monkeypatch.setattr(budget, "free_on", lambda device, free=free: free)
        step = Step(model_of(layers=2), memory_budget="auto", bodies="eager")
        peak = step.peak()
        assert peak <= free - STATE * trained
        assert (step.backend.facts[0].program is None) == is_whole


def run(recorded: Any, program: Program) -> None:
    """Both halves on real tensors, holding nothing that the backward half frees."""
    results = list(OuterRunner(program.forward)(list(recorded.primals)))
    outputs, tensors, numbers = results[:1], results[1 : 1 + len(program.saved)], results[1 + len(program.saved) :]
    arguments = [*numbers, *tensors, *recorded.tangents]
    del results, tensors, numbers
    assert program.backward is not None
    OuterRunner(program.backward)(arguments)
    del outputs


def assert_peak_is_predicted(recorded: Any, program: Program | None) -> int:
    """Runs a program; returns the bytes that were alive at its peak."""
    assert program is not None
    predicted = cost_of(program.forward, program.backward, 1).peak
    with Meter() as meter:
        run(recorded, program)
    assert meter.peak == pytest.approx(predicted, rel=0.05)
    return meter.peak


@pytest.mark.parametrize("lengths", [(96, 24), (32, 0)])
def test_that_no_split_is_tried_is_said_where_it_could_help(lengths: tuple[int, int]) -> None:
    """Of a graph of two sequences, and only there."""
    encoder, decoder = lengths
    model = Translator(layers=1) if decoder else Causal()
    inputs = batch(encoder, decoder) if decoder else (tokens(1, encoder), tokens(1, encoder))
    with pytest.raises(OverBudgetError) as caught, however_small():
        streamfx.explain(model, *inputs, memory_budget=1000, chunk_size=5)
    assert ("within one that is not tried" in str(caught.value)) == bool(decoder)
    assert caught.value.smallest > 1000 and "parameters" in caught.value.terms and "raise the budget" in caught.value.do


def test_a_split_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each graph, also where `strict=True` asks before whether it streams in two parts."""
    looked: list[fx.Graph] = []

    def where(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
        looked.append(graph)
        return where_to_split(facts, graph, peak)

    monkeypatch.setattr(streamfx.frontend.split_graphs, "where_to_split", where)
    torch._dynamo.reset()
    run = torch.compile(Translator(layers=1), backend="streambp", options={"bodies": "eager", "chunk_size": 5, "strict": True})
    with however_small():
        run(*batch(96, 24))
    assert looked and len(looked) == len(set(looked))


def positions() -> nn.Module:
    """Learned positions, biases, one product for queries, keys and values."""
    return hf.gpt2(n_positions=LENGTH, n_embd=64, n_layer=LAYERS)


TEN = [hf.llama, hf.qwen3, hf.qwen3_tied, hf.mistral, hf.gemma2, hf.gemma3, hf.gpt_neox, hf.phi3, hf.olmo2, positions]


@pytest.mark.long
@pytest.mark.parametrize("make", TEN, ids=lambda make: make.__name__)
def test_ten_models_within_four_budgets(make: Any) -> None:
    """The joint graph is recorded once; programs for each level of what is kept and each budget are run on real tensors."""
    step = Step(model_of(make), chunk_size=128, loss_chunk_size=128, outputs="dense")
    step.compiled(step.ids).backward()
    (recorded,) = step.backend.compilations
    chunks = {"chunk_size": 128, "loss_chunk_size": 128}
    for save in SAVE_LEVELS:
        assert_peak_is_predicted(recorded, recorded.facts_for(resolved({**chunks, "save": save})).program)
    with pytest.raises(OverBudgetError) as caught:
        recorded.facts_for(resolved({"memory_budget": 1}))
    least, free = caught.value.smallest, step.held() + step.predicted()
    for amount in (least + 4096, (least + free) // 2, int(1.2 * free), 2 * free):
        program = recorded.facts_for(resolved({"memory_budget": amount})).program
        assert step.held() + assert_peak_is_predicted(recorded, program) <= amount
