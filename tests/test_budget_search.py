"""The search for a plan within a memory budget: what it finds fits, is mixed where that helps, and gets faster with memory."""

from itertools import pairwise
from typing import Any

import pytest

from streamfx.errors import OverBudgetError
from streamfx.ir.search_trace import Candidate
from streamfx.options import SAVE_LEVELS, resolve_options
from streamfx.passes import plan_simulator
from streamfx.passes.partition.budget_search import LadderSearch
from streamfx.passes.partition.plan_simulator import PlanSimulator
from tests.support import hf
from tests.support.budgets import CHUNKS, Step, peak_as_predicted

pytestmark = pytest.mark.compiled


@pytest.mark.long
@pytest.mark.parametrize("make", [hf.qwen3_tied, hf.gemma3], ids=lambda make: make.__name__)
def test_models_within_four_budgets(make: Any) -> None:
    """The joint graph is recorded once; programs for each save level and budget run on real tensors."""
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


@pytest.fixture(scope="module")
def recorded_step() -> Step:
    """A step whose joint graph was recorded once."""
    step = Step(outputs="dense", bodies="eager")
    step.compiled(step.ids).backward()
    return step


def smallest_budget(simulator: PlanSimulator) -> int:
    with pytest.raises(OverBudgetError) as caught:
        LadderSearch(simulator, 1).find_plan()
    return caught.value.smallest


def test_some_stages_keep_more_than_others(recorded_step: Step) -> None:
    """Just above the smallest budget, the last stages keep results of attention; the measured peak is within the budget."""
    (recorded,) = recorded_step.backend.compilations
    facts = recorded.facts_for(resolve_options({"save": "inputs", "loss_chunk_size": 256}))
    simulator = plan_simulator(facts, resolve_options({"loss_chunk_size": 256}))
    mixed = Candidate("inputs", 1, 2, Candidate("attention", 1))
    amount = simulator.held + simulator.simulate(mixed, 256, 256).peak
    facts = recorded.facts_for(resolve_options({"memory_budget": amount, "loss_chunk_size": 256}))
    *kept, _ = (len(nodes) for nodes in facts.plan.kept)  # the head keeps nothing
    assert kept == sorted(kept) and len(set(kept)) == 2
    assert recorded_step.held() + peak_as_predicted(recorded, facts.program) <= amount


@pytest.mark.long
def test_more_memory_makes_no_step_slower(recorded_step: Step) -> None:
    """Over 40 budgets from the smallest one to that of the fastest plan, there are many plans."""
    (recorded,) = recorded_step.backend.compilations
    simulator = plan_simulator(recorded.facts_for(resolve_options({})), resolve_options({}))
    least, fastest = smallest_budget(simulator), LadderSearch(simulator, 1 << 40).find_fastest()
    most = simulator.held + simulator.simulate(fastest.candidate, *fastest.rows).peak
    plans = {amount: LadderSearch(simulator, amount).find_fastest() for amount in range(least, most, (most - least) // 40)}
    assert all(later.seconds <= 1.01 * plan.seconds for plan, later in pairwise(plans.values()))
    assert len(set(plans.values())) >= 10 and any(plan.candidate.richer for plan in plans.values())
    for amount, plan in plans.items():
        assert simulator.held + simulator.simulate(plan.candidate, *plan.rows).peak <= amount
