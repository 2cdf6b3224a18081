"""Searches for a memory budget, on facts that have a program."""

from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts
from streamfx.options import Options
from streamfx.passes.lowering.build_program import BuildProgram
from streamfx.passes.lowering.reinsert_collectives import ReinsertCollectives
from streamfx.passes.partition.budget_search import LadderSearch
from streamfx.passes.partition.plan_simulator import PlanSimulator


def simulator_of(facts: Facts, options: Options) -> PlanSimulator:
    """The simulator of plans for the lengths of the call."""
    return PlanSimulator(
        facts,
        options,
        lambda planned: ReinsertCollectives(options).apply(BuildProgram().apply(planned)),
        Lengths.of_current_call(facts.joint.graph),
    )


def ladder_of(facts: Facts, options: Options, budget: int = 1 << 60) -> LadderSearch:
    """The search for a budget, in bytes."""
    return LadderSearch(simulator_of(facts, options), budget)
