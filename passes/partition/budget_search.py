"""Search for the fastest plan whose peak memory stays within the budget.

Plans form a ladder (`plan_simulator.py`): the richest keep the results of all products, the poorest recompute stages from
few stored boundaries. Each candidate is built and simulated, so the simulated program is the one that runs, with chunks as
large as the budget allows. Between the fastest candidate that fits and its neighbors, one step of the ladder is divided: the last
stages are planned like the richer neighbor. Their backward runs first, so the values that they keep are freed before the
gradients of most parameters exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from streamfx.budget import budget_bytes, format_bytes
from streamfx.cost.categories import PARAMETERS, STAGE_INPUTS
from streamfx.cost.memory import Cost
from streamfx.errors import OverBudgetError, describe_error
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import device_of
from streamfx.ir.program import Program
from streamfx.ir.search_trace import Candidate, SearchTrace
from streamfx.ir.stage_plan import MIN_ROWS, AutoChunk
from streamfx.log import log
from streamfx.options import SAVE_LEVELS, Options, min_save_level
from streamfx.passes.partition.chunk_sizes import gradient_bytes
from streamfx.passes.partition.interloop_values import InterloopValues
from streamfx.passes.partition.plan_simulator import (
    PlanSimulator,
    held_bytes,
    kept_bytes,
    limit_rows,
    rows_of_chunks,
    set_limits,
    stages_that_differ,
    with_limits,
)

MAX_HALVINGS = 24  # of the rows of a chunk
FEWEST_ROWS = 16  # of a chunk, if `MIN_ROWS` take more than `SMALL_SHARE` more memory
SMALL_SHARE = 0.02
KEEP_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_MIXTURES = 4  # mixed candidates of two neighbors on the ladder
ESTIMATE_TOLERANCE = 1.03  # an estimate up to this factor above the budget is worth a simulation


@dataclass(frozen=True)
class BudgetSearch:
    """The pass. `rewrite` builds the program of a plan, which is then simulated."""

    name: ClassVar[str] = "budget_search"
    options: Options
    rewrite: Callable[[Facts], Facts]

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with the fastest plan whose peak is within the budget; the same facts without a budget or loops.

        The plan is for longer inputs than the call's if possible. Raise `OverBudgetError` if no plan fits.
        """
        budget = self.options.memory_budget
        if budget is None or facts.program is None:
            return facts
        current_lengths = Lengths.of_current_call(facts.joint.graph)
        held = held_bytes(facts.program.forward.graph)
        budget_in_bytes = budget_bytes(budget, device_of(facts.joint.graph), held, gradient_bytes(facts.joint.gradients))
        for lengths in current_lengths.with_headroom() if current_lengths else (current_lengths,):
            search = LadderSearch(PlanSimulator(facts, self.options, self.rewrite, lengths), budget_in_bytes)
            try:
                with lengths.assumed():
                    return search.find_plan()
            except OverBudgetError as error:
                over_budget = error
            except Exception as error:  # the graph does not support these lengths: they exceed a position table, for example
                if lengths == current_lengths:
                    raise
                log.info("the memory of a plan for %s is not known: %s", lengths, describe_error(error))
        raise over_budget


class FittingPlan(NamedTuple):
    """A candidate that fits into the budget, the estimated seconds of a step, and the rows per chunk: of layers, of the head."""

    seconds: float
    candidate: Candidate
    rows: tuple[int, int]


@dataclass
class LadderSearch:
    """Searches for the fastest plan within a budget, in bytes. `refused`: costs of candidates with their smallest chunks."""

    simulator: PlanSimulator
    budget: int
    refused: list[Cost] = field(default_factory=list)

    def find_plan(self) -> Facts:
        """Return the facts with the plan that is estimated to be the fastest. Raise `OverBudgetError` if none fits."""
        return self.with_chosen_plan(self.find_fastest())

    def find_fastest(self) -> FittingPlan:
        """Return the plan that is estimated to be the fastest. Raise `OverBudgetError` if none fits.

        Each candidate keeps less than the previous one, which leaves memory for larger chunks. So the search continues
        after the first one that fits, while candidates are faster than the previous one.
        """
        fastest: FittingPlan | None = None
        previous, pairs = None, list[tuple[Candidate, Candidate | None]]()  # neighbors on the ladder, the poorer one first
        for candidate in self.ladder:
            if fastest is not None:
                pairs.append((candidate, previous))
                if self.fewest_seconds(candidate) >= fastest.seconds:
                    break
            plan = self.fit(candidate) if self.may_fit(candidate) else None
            if plan is not None and fastest is None:
                pairs.append((candidate, previous))
            if plan is not None and fastest is not None and plan.seconds >= fastest.seconds:
                break
            fastest, previous = plan or fastest, candidate
        if fastest is None:
            fastest = self.fastest_of_poorest()
        if fastest is None:
            raise over_budget_error(self.budget, self.simulator.held, min(self.refused, key=lambda cost: cost.peak))
        for pair in pairs:
            for mixture in self.mixtures(*pair):
                if self.fewest_seconds(mixture) < fastest.seconds and (plan := self.fit(mixture)) is not None:
                    fastest = min(fastest, plan, key=lambda plan: plan.seconds)
        return fastest

    def fastest_of_poorest(self) -> FittingPlan | None:
        """Return the fastest of the candidates that keep the fewest values, whatever their estimated peak; None if none fits.

        All of them are simulated, so the error has the smallest possible peak.
        """
        first = self.ladder.index(self.base[0])
        fitting = [plan for candidate in self.ladder[first:] if (plan := self.fit(candidate)) is not None]
        return min(fitting, key=lambda plan: plan.seconds, default=None)

    def fewest_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound on the estimated seconds: those of the FLOPs, which are the fewest with the smallest chunks."""
        rows = self.row_counts[0]
        return self.simulator.seconds_of_flops(self.simulator.simulate(candidate, rows, rows))

    # -- candidates

    @cached_property
    def ladder(self) -> list[Candidate]:
        """The candidates that the options allow, the richest first.

        First those that keep more values, then one with all stage boundaries stored, then those with fewer boundaries.
        """
        options, facts = self.simulator.options, self.simulator.facts
        save = self.min_level if options.save == "auto" else options.save
        if InterloopValues(facts).has_exchanges:  # the sizes of one rank must not decide how often ranks exchange rows
            return [Candidate(save, 1 if options.keep_every == "auto" else options.keep_every)]
        automatic = [keep_every for keep_every in KEEP_EVERY if keep_every < max(len(facts.stages), 2)]
        smallest_every, *larger = automatic if options.keep_every == "auto" else [options.keep_every]
        levels = SAVE_LEVELS[SAVE_LEVELS.index(self.min_level) :] if options.save == "auto" else [save]
        distinct: dict[Any, Candidate] = {}  # the first of several levels that keep the same values
        for candidate in (Candidate(level, smallest_every) for level in levels):
            distinct.setdefault(self.simulator.facts_with_plan(candidate).plan.kept, candidate)
        return [*[*distinct.values()][::-1], *(Candidate(save, keep_every) for keep_every in larger)]

    @property
    def min_level(self) -> str:
        """The lowest level of `save` that the option `offload` allows."""
        return min_save_level(self.simulator.options.offload)

    @cached_property
    def base(self) -> tuple[Candidate, Cost]:
        """The candidate with all boundaries stored that keeps the fewest values, and its cost with the smallest chunks."""
        fewest = min((one.keep_every for one in self.ladder), default=1)
        candidate = [one for one in self.ladder if one.keep_every == fewest][-1]
        rows = self.smallest_rows(candidate)
        return candidate, self.simulator.simulate(candidate, rows, rows)

    def may_fit(self, candidate: Candidate) -> bool:
        """Return whether the estimated peak of a candidate is not clearly above the budget.

        The estimate is the simulated peak of the base with the smallest chunks, plus the bytes that the candidate keeps, or
        less the share of stored boundaries that it does not hold at once: with `keep_every` = k, it holds 1 / k of all, and
        k - 1 more while it recomputes k stages.
        """
        return self._estimated_peak(candidate) <= self.available_bytes * ESTIMATE_TOLERANCE

    def _estimated_peak(self, candidate: Candidate) -> int:
        """Return the estimated peak of a candidate on the ladder, in bytes, with the smallest chunks."""
        (base, cost), simulator = self.base, self.simulator
        kept = kept_bytes(simulator.facts_with_plan(candidate)) - kept_bytes(simulator.facts_with_plan(base))
        ratio = candidate.keep_every / base.keep_every
        held_share = min(1, 1 / ratio + (ratio - 1) / max(len(simulator.facts.stages), 1))
        return int(cost.peak + max(kept, 0) - cost.peak_terms.get(STAGE_INPUTS, 0) * (1 - held_share))

    def mixtures(self, candidate: Candidate, richer: Candidate | None) -> Iterator[Candidate]:
        """Yield candidates between two neighbors on the ladder that may fit: with as many richer stages as possible, half, ..."""
        if richer is None:
            return
        simulator = self.simulator
        plans = [simulator.facts_with_plan(one).plan for one in (candidate, richer)]
        num_stages = len(stages_that_differ(*plans))
        low, high = (self._estimated_peak(one) for one in (candidate, richer))
        share = 1.0 if high <= low else (self.available_bytes - low) / (high - low)
        most = min(num_stages - 1, max(0, int(share * num_stages)) + 1)
        counts = [count for i in range(MAX_MIXTURES) if (count := most >> i)]
        yield from (replace(candidate, num_richer=count, richer=richer) for count in counts)

    # -- chunks

    @property
    def available_bytes(self) -> int:
        """The budget without the bytes of parameters and inputs."""
        return self.budget - self.simulator.held

    @cached_property
    def row_counts(self) -> list[int]:
        """The rows per chunk that are tried, in ascending order: `MIN_ROWS`, and all rows, half of them, a quarter, ..."""
        length = self.simulator.length
        halves = [-(-length // (1 << i)) for i in range(MAX_HALVINGS)]
        return sorted({min(length, MIN_ROWS), *(rows for rows in halves if rows >= MIN_ROWS)})

    def smallest_rows(self, candidate: Candidate) -> int:
        """Return the rows of the smallest chunks: `MIN_ROWS`, or `FEWEST_ROWS` if that takes 2 % less memory.

        Fewer rows take more time, because each chunk adds to the gradients of all weights.
        """
        rows, fewest = self.row_counts[0], min(FEWEST_ROWS, self.simulator.length)
        peak = self.simulator.simulate(candidate, rows, rows).peak
        if peak <= self.available_bytes:
            return rows
        saved = peak - self.simulator.simulate(candidate, fewest, fewest).peak
        return fewest if saved > SMALL_SHARE * (peak + self.simulator.held) else rows

    def fit(self, candidate: Candidate) -> FittingPlan | None:
        """Return a candidate with the fastest chunks that a few simulations find to fit into the budget; None if none fit.

        The rows per chunk of the head and of the other stages are bisected at once: the peaks of loops tell which ones to reduce.
        """
        smallest = self.smallest_rows(candidate)
        cost = self.simulator.simulate(candidate, smallest, smallest)
        if cost.peak > self.available_bytes:
            self.refused.append(cost)
            return None
        found = [FittingPlan(self.simulator.seconds(cost), candidate, (smallest, smallest))]
        if not self.simulator.has_automatic_chunks:
            return found[0]
        counts = [smallest, *self.row_counts[self.row_counts[0] == smallest :]]
        fitting, too_large = [0, 0], [len(counts), len(counts)]  # indices into `counts`, for layers and for the head
        while any(high - low > 1 for low, high in zip(fitting, too_large, strict=True)):
            tried = [(low + high) // 2 for low, high in zip(fitting, too_large, strict=True)]
            layers, loss = (counts[index] for index in tried)
            cost = self.simulator.simulate(candidate, layers, loss)
            is_above = self._loops_above_budget(candidate, cost)
            if cost.peak > self.available_bytes and not any(is_above):  # a value between loops
                is_above = (True, True)
            for kind, index in enumerate(tried):
                fitting[kind], too_large[kind] = (fitting[kind], index) if is_above[kind] else (index, too_large[kind])
            if not any(is_above):
                found.append(FittingPlan(self.simulator.seconds(cost), candidate, (layers, loss)))
        layers, loss = (counts[index] for index in fitting)
        cost = self.simulator.simulate(candidate, layers, loss)
        if cost.peak <= self.available_bytes:
            found.append(FittingPlan(self.simulator.seconds(cost), candidate, (layers, loss)))
        return min(found, key=lambda plan: plan.seconds)

    def _loops_above_budget(self, candidate: Candidate, cost: Cost) -> tuple[bool, bool]:
        """Return whether the peak of a loop exceeds the budget: of a loop of the layers, and of one of the head and the loss."""
        chunks = {loop.spec.name: loop.spec.chunk_size for loop in self.simulator.program(candidate).loops}
        above = [chunks.get(name) for name, loop in cost.loops.items() if loop.peak > self.available_bytes]
        is_loss = [chunk.is_loss for chunk in above if isinstance(chunk, AutoChunk)]
        return False in is_loss, True in is_loss

    # -- the result

    def with_chosen_plan(self, fastest: FittingPlan) -> Facts:
        """Return the facts with a plan, its program and its limits, and with the lengths for which the plan is valid.

        Those are the longest dynamic sizes at which the program still fits; chunks get at most the rows that they have there.
        """
        simulator, limits = self.simulator, self.simulator.limits_for(*fastest.rows)
        peak = simulator.simulate(fastest.candidate, *fastest.rows).peak + simulator.held
        chosen = next(one for one in simulator.simulated if (one.candidate, one.peak) == (fastest.candidate, peak))
        facts = simulator.facts_with_program(fastest.candidate)
        program, plan, valid_lengths = known(facts.program), facts.plan, facts.lengths
        set_limits(program, limits)
        plan = replace(plan, chunk_sizes=tuple(with_limits(size, limits) for size in plan.chunk_sizes))
        if simulator.lengths:
            longest = simulator.lengths.longest_valid(lambda longer: self.still_fits(program, longer))
            limit_rows(program, longest)
            valid_lengths = longest.intersection(facts.lengths)
        return replace(
            facts,
            found_plan=plan,
            lengths=valid_lengths,
            search_trace=SearchTrace(self.budget, tuple(simulator.simulated), chosen),
        )

    def still_fits(self, program: Program, longer: Lengths) -> bool:
        """Return whether a program also fits at longer lengths, with at least half as many rows per chunk.

        Sizes evaluate to `longer` during this call.
        """
        rows = zip(rows_of_chunks(program, longer), rows_of_chunks(program, self.simulator.lengths), strict=True)
        has_enough_rows = all(2 * longer_rows >= current_rows for longer_rows, current_rows in rows)
        return has_enough_rows and self.simulator.cost(program).peak <= self.available_bytes


def over_budget_error(budget: int, held: int, cost: Cost) -> OverBudgetError:
    """Return the error for a budget that no plan fits into: its message has the four largest parts of the peak, and a remedy.

    `cost`: the simulation with the smallest peak, which does not include `held`, the bytes of parameters and inputs.
    """
    terms = {PARAMETERS: held, **cost.peak_terms}
    largest_first = sorted(terms.items(), key=lambda item: -item[1])
    largest_terms = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_first[:4] if size)
    remedy = REMEDIES.get(largest_first[0][0], "a shorter sequence or a smaller batch")
    error = OverBudgetError(
        f"memory_budget of {format_bytes(budget)} is less than any plan for this step takes",
        found=f"the smallest possible peak is {format_bytes(held + cost.peak)} ({held + cost.peak} bytes): {largest_terms}",
        do=f"raise the budget, or reduce the largest part: {remedy}",
    )
    error.smallest, error.terms = held + cost.peak, terms
    return error


REMEDIES = {
    PARAMETERS: "parameters in a smaller dtype, or sharded over more devices",
    "gradients": "train fewer parameters, as with adapters",
    STAGE_INPUTS: "a shorter sequence or a smaller batch",
}
