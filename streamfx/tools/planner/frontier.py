"""Memory against time: the plans that the search finds for budgets between the smallest one and that of the fastest plan."""

from __future__ import annotations

from dataclasses import dataclass

from streamfx.cost.work import Work
from streamfx.errors import OverBudgetError, PlanError
from streamfx.ir.facts import Facts
from streamfx.options import Options
from streamfx.passes import plan_simulator
from streamfx.passes.partition.budget_search import LadderSearch

NUM_BUDGETS = 10


@dataclass(frozen=True)
class FrontierPlan:
    """A plan on the frontier: its peak in bytes, including parameters and optimizer, its work, and the choice of saved values.

    `rows`: the rows per chunk of the layers, and of the head.
    """

    peak_bytes: int
    work: Work
    choice: str
    rows: tuple[int, int]


def frontier_of(facts: Facts, options: Options, constant_bytes: int) -> tuple[FrontierPlan, ...]:
    """Return distinct plans for `NUM_BUDGETS` budgets, the smallest peak first; larger budgets are further apart.

    `facts` are those of a plan without a budget; `constant_bytes` are the parameters, the optimizer's state, and the inputs.
    Raise `PlanError` if nothing streams.
    """
    if facts.program is None:
        raise PlanError("there is one plan only", found="nothing streams", do="omit frontier")
    simulator = plan_simulator(facts, options)
    try:
        LadderSearch(simulator, 0).find_fastest()
    except OverBudgetError as error:
        least = error.smallest
    fastest = LadderSearch(simulator, 1 << 62).find_fastest()
    most = simulator.held + simulator.simulate(fastest.candidate, *fastest.rows).peak
    budgets = [least + (most - least) * step**2 // (NUM_BUDGETS - 1) ** 2 for step in range(NUM_BUDGETS)]
    plans: dict[int, FrontierPlan] = {}
    for budget in budgets:
        found = LadderSearch(simulator, budget).find_fastest()
        cost = simulator.simulate(found.candidate, *found.rows)
        peak = constant_bytes + cost.peak
        plans.setdefault(peak, FrontierPlan(peak, cost.work, str(found.candidate), found.rows))
    return tuple(plan for _, plan in sorted(plans.items()))
