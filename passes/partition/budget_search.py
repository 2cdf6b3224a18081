"""Search for the fastest plan whose peak memory stays within the budget.

Candidates that cost no time come first: large chunks, and attention results kept. Then come those that cost some time:
attention recomputed, and stages between boundaries recomputed. Each candidate is built and simulated, so the simulated
program is the one that runs.

A *candidate* is a level of values to keep (`save`) and how many stages share one stored boundary (`keep_every`). The *working
set* is the limit on the bytes of intermediate values of a chunk; an automatic chunk size (`AutoChunk`) has as many rows as fit
into it. *Held* bytes are the parameters and inputs, which no plan can save. *Lengths* are values of the dynamic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import fx

from streamfx.budget import budget_bytes, format_bytes
from streamfx.cost.categories import CHUNK, LOSS, PARAMETERS, STAGE_INPUTS, loss_values
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, bytes_like, cost_of
from streamfx.cost.rates import rates_of
from streamfx.errors import OverBudgetError, describe_error
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import device_of
from streamfx.ir.program import Program
from streamfx.ir.search_trace import Candidate, SearchTrace, SimulatedCandidate
from streamfx.ir.stage_plan import MIN_ROWS, AutoChunk, ChunkSize
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import SAVE_LEVELS, Options, min_save_level
from streamfx.passes.partition.chunk_plan import ChunkPlan
from streamfx.passes.partition.chunk_sizes import chunk_sizes, gradient_bytes, tokens
from streamfx.passes.partition.interloop_values import InterloopValues

EFFICIENT_TOKENS = 512  # below this many tokens, a chunk's products are too small to keep a device busy
KEEP_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_STEPS = 5
MARGIN = 0.95  # share of the remaining memory that larger chunks are to use
MIN_GROWTH = 1.25  # the search stops if chunks would grow by less than this factor
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
            search = _BudgetSearch(facts, self.options, self.rewrite, budget_in_bytes, lengths)
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


def held_bytes(graph: fx.Graph, omitted: Collection[fx.Node] = ()) -> int:
    """Return the bytes of a graph's inputs, including parameters, except those in `omitted`; a step holds them in any case."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if node not in omitted)
    return sum(bytes_like(node.meta[VALUE]) for node in inputs if VALUE in node.meta)


def kept_bytes(facts: Facts) -> int:
    """Return the bytes of the forward values that a plan keeps on the device for backward, in addition to stage outputs."""
    offloaded = {node for nodes in facts.plan.offloaded for node in nodes}
    return sum(bytes_like(node.meta[VALUE]) for nodes in facts.plan.kept for node in nodes if node not in offloaded)


class _FittingPlan(NamedTuple):
    """A plan that fits into the budget: the estimated seconds of a step, the facts with its program, and its working set."""

    seconds: float
    facts: Facts
    working_set: int | None


@dataclass
class _BudgetSearch:
    """Searches for the fastest plan within a budget, for inputs of these lengths; caches plans and costs.

    `facts` have the plan and program of the default options; `rewrite` builds the program of another plan. `budget`: bytes.
    """

    facts: Facts
    options: Options
    rewrite: Callable[[Facts], Facts]
    budget: int
    lengths: Lengths
    simulated: list[SimulatedCandidate] = field(default_factory=list)
    costs: list[tuple[tuple[Candidate, int | None], Cost]] = field(default_factory=list)
    plans: dict[Candidate, Facts] = field(default_factory=dict)

    def find_plan(self) -> Facts:
        """Return the facts with the fastest candidate that fits with efficient chunks, or else the first with small chunks.

        Each candidate keeps less than the previous one, which leaves memory for larger chunks. So the search continues
        after the first one that fits, while candidates are faster than the previous one. Raise `OverBudgetError` if none fits.
        """
        fallback: tuple[Candidate, Facts] | None = None
        fastest: _FittingPlan | None = None
        for candidate in self.candidates():
            facts = self.facts_with_program(candidate)
            program = known(facts.program)
            min_set, efficient_set = self.working_sets(program)
            cost = self.simulate(candidate, program, efficient_set)
            if cost.peak <= self.available_bytes:
                working_set = self.largest_working_set(candidate, program, efficient_set, cost)
                seconds = self.seconds(self.simulate(candidate, program, working_set))
                if fastest is not None and seconds >= fastest.seconds:
                    break
                fastest = _FittingPlan(seconds, facts, working_set)
            elif fastest is not None:
                break
            elif efficient_set != min_set and fallback is None:
                cost = self.simulate(candidate, program, min_set)
                if cost.peak <= self.available_bytes:
                    fallback = candidate, facts
        if fastest is not None:
            return self.with_chosen_plan(fastest.facts, fastest.working_set)
        if fallback is None:
            raise over_budget_error(self.budget, self.held, self.smallest)
        candidate, facts = fallback
        return self.with_chosen_plan(facts, self.largest_below_efficient(candidate, known(facts.program)))

    def seconds(self, cost: Cost) -> float:
        """Estimate the duration of a step in seconds, from its FLOPs, bytes moved and kernels, if Inductor compiles its loops."""
        work = cost.work.compiled
        return rates_of(device_of(self.facts.joint.graph)).seconds(work.flops, work.moved + work.total_bytes, work.launches)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the candidates that the options allow, the fastest first, except those that clearly exceed the budget.

        First those that keep more values, then one with all stage boundaries stored, then those with fewer boundaries. Their
        peaks are estimated only when the previous candidates have been simulated.
        """
        num_stages = len(self.facts.stages)
        save = self.min_level if self.options.save == "auto" else self.options.save
        if InterloopValues(self.facts).has_exchanges:  # the sizes of one rank must not decide how often ranks exchange rows
            yield Candidate(save, 1 if self.options.keep_every == "auto" else self.options.keep_every)
            return
        automatic = [keep_every for keep_every in KEEP_EVERY if keep_every < max(num_stages, 2)]
        smallest_every, *larger = automatic if self.options.keep_every == "auto" else [self.options.keep_every]
        if self.options.save == "auto":
            yield from self.candidates_keeping_more(smallest_every)
        yield Candidate(save, smallest_every)
        with_fewer_boundaries = [Candidate(save, keep_every) for keep_every in larger]
        peaks = [self.estimate(candidate, num_stages) for candidate in with_fewer_boundaries]
        for candidate, peak in zip(with_fewer_boundaries, peaks, strict=True):
            if peak <= self.available_bytes * ESTIMATE_TOLERANCE or peak == min(peaks):
                yield candidate

    def candidates_keeping_more(self, keep_every: int) -> Iterator[Candidate]:
        """Yield candidates that keep more values than the options require and may fit, those with the most values first.

        Whether one may fit is estimated: the simulated peak at the required level, plus the bytes that it keeps.
        """
        program = known(self.facts.program)
        _, efficient_set = self.working_sets(program)
        base = self.simulate(Candidate(self.min_level, keep_every), program, efficient_set)
        by_kept: dict[Any, Candidate] = {}  # the first of several levels that keep the same values
        for level in SAVE_LEVELS[SAVE_LEVELS.index(self.min_level) + 1 :]:
            candidate = Candidate(level, keep_every)
            planned = self.facts_with_plan(candidate)
            if base.peak + kept_bytes(planned) <= self.available_bytes * ESTIMATE_TOLERANCE:
                by_kept.setdefault(planned.plan.kept, candidate)
        yield from [candidate for kept, candidate in by_kept.items() if any(kept)][::-1]

    def estimate(self, candidate: Candidate, num_stages: int) -> int:
        """Return an estimate of the peak bytes of a candidate that stores one of k boundaries, k = `keep_every`.

        It is the smallest simulated peak, less the share of the stored boundaries that the candidate does not hold at once: it
        holds 1 / k of all, and k - 1 more while it recomputes k stages.
        """
        cost, k = self.smallest, candidate.keep_every
        held_share = min(1, 1 / k + (k - 1) / max(num_stages, 1))
        return int(cost.peak - cost.peak_terms.get(STAGE_INPUTS, 0) * (1 - held_share))

    @property
    def smallest(self) -> Cost:
        """The simulated cost with the smallest peak."""
        return min((cost for _, cost in self.costs), key=lambda cost: cost.peak)

    @property
    def min_level(self) -> str:
        """The lowest level of `save` that the option `offload` allows."""
        return min_save_level(self.options.offload)

    def with_choices(self, candidate: Candidate) -> Options:
        """Return the options with a candidate's `save` and `keep_every`."""
        return replace(self.options, save=candidate.save, keep_every=candidate.keep_every)  # type: ignore[arg-type]

    def facts_with_plan(self, candidate: Candidate) -> Facts:
        """Return the facts with the plan of a candidate, but not its program (cached)."""
        if candidate not in self.plans:
            self.plans[candidate] = ChunkPlan(self.with_choices(candidate), self.chunk_sizes).apply(self.facts)
        return self.plans[candidate]

    @cached_property
    def chunk_sizes(self) -> tuple[ChunkSize, ...]:
        """The chunk size of each stage before a working set is chosen; the same for all candidates."""
        return chunk_sizes(self.facts, self.options)

    def facts_with_program(self, candidate: Candidate) -> Facts:
        """Return the facts with the plan and program of a candidate; `self.facts`, which have both, if its plan is equal."""
        planned = self.facts_with_plan(candidate)
        current_plan, new_plan = self.facts.plan, planned.plan
        is_equal = (current_plan.kept, current_plan.dropped) == (new_plan.kept, new_plan.dropped)
        return self.facts if is_equal else self.rewrite(planned)

    @property
    def held(self) -> int:
        """The bytes of parameters and inputs."""
        return held_bytes(known(self.facts.program).forward.graph)

    @property
    def available_bytes(self) -> int:
        """The budget without the bytes of parameters and inputs."""
        return self.budget - self.held

    def working_sets(self, program: Program) -> tuple[int | None, int | None]:
        """Return the working sets (bytes) of the smallest chunks, and of chunks large enough to keep the device busy.

        (None, None) if no loop has an automatic chunk size.
        """
        automatic = [loop.spec.chunk_size for loop in program.loops if isinstance(loop.spec.chunk_size, AutoChunk)]
        if not automatic:
            return None, None
        row_bytes = max(self.lengths.evaluate(chunk.row_bytes) for chunk in automatic)
        efficient_rows = min(self.length, max(MIN_ROWS, EFFICIENT_TOKENS * self.length // tokens(self.facts)))
        return row_bytes * min(self.length, MIN_ROWS // 4), row_bytes * efficient_rows

    @property
    def length(self) -> int:
        """The sequence length, at least 1."""
        return sequence_length(self.facts) or 1

    def largest_working_set(self, candidate: Candidate, program: Program, fitting: int | None, cost: Cost) -> int | None:
        """Return the largest working set (bytes) that a few simulations find to fit into the budget.

        The working set `fitting` fits, with this `cost`. Trials extrapolate from the memory that is left, or bisect after one
        has failed. None if `fitting` is None, because chunk sizes are fixed.
        """
        if fitting is None:
            return None
        automatic = [loop.spec.chunk_size for loop in program.loops if isinstance(loop.spec.chunk_size, AutoChunk)]
        max_working_set = max(self.lengths.evaluate(chunk.row_bytes) for chunk in automatic) * self.length
        low, high, has_failed = fitting, max_working_set, False
        for _ in range(MAX_STEPS):
            chunk_bytes = max(cost.peak_terms.get(CHUNK, 0) + cost.peak_terms.get(LOSS, 0), low // 8)  # at the peak
            trial = low + int(MARGIN * (self.available_bytes - cost.peak) * low / chunk_bytes)
            if trial >= high:
                trial = math.isqrt(low * high) if has_failed else high
            if trial < low * MIN_GROWTH:
                break
            larger = self.simulate(candidate, program, trial)
            if larger.peak <= self.available_bytes:
                low, cost = trial, larger
            else:
                high, has_failed = trial, True
        return low

    def largest_below_efficient(self, candidate: Candidate, program: Program) -> int:
        """Return the largest working set (bytes, up to a factor of 2) that fits, below that of efficient chunks (bisection).

        That of the smallest chunks must fit.
        """
        low, high = self.working_sets(program)
        assert low is not None and high is not None
        while high > 2 * low:
            middle = math.isqrt(low * high)
            if self.simulate(candidate, program, middle).peak <= self.available_bytes:
                low = middle
            else:
                high = middle
        return low

    def simulate(self, candidate: Candidate, program: Program, working_set: int | None) -> Cost:
        """Return the cost of a step with chunks of this working set (cached); it is recorded in `simulated`.

        Sets the working set of the program's loops.
        """
        set_working_set(program, working_set)
        cached = next((cost for key, cost in self.costs if key == (candidate, working_set)), None)
        if cached is not None:
            return cached
        cost = self.cost(program)
        self.simulated.append(SimulatedCandidate(candidate, working_set, cost.peak + self.held))
        self.costs.append(((candidate, working_set), cost))
        log.debug("%s, %s of work: peak %s", candidate, working_set, format_bytes(cost.peak + self.held))
        return cost

    def cost(self, program: Program) -> Cost:
        """Simulate a step of the program and return its cost."""
        return cost_of(program.forward, program.backward, len(self.facts.joint.outputs), loss_values(self.facts))

    def with_chosen_plan(self, facts: Facts, working_set: int | None) -> Facts:
        """Return the facts (with a plan and program) with this working set, and with the lengths for which the plan is valid.

        Those are the longest dynamic sizes at which the program still fits; chunks get at most the rows that they have there.
        """
        program, plan, valid_lengths = known(facts.program), facts.plan, facts.lengths
        set_working_set(program, working_set)
        plan = replace(plan, chunk_sizes=tuple(with_working_set(size, working_set) for size in plan.chunk_sizes))
        if self.lengths:
            longest = self.lengths.longest_valid(lambda longer: self.still_fits(program, longer))
            limit_rows(program, longest)
            valid_lengths = longest.intersection(facts.lengths)
        return replace(
            facts, found_plan=plan, lengths=valid_lengths, search_trace=SearchTrace(self.budget, tuple(self.simulated))
        )

    def still_fits(self, program: Program, longer: Lengths) -> bool:
        """Return whether a program also fits at longer lengths, with at least half as many rows per chunk.

        Sizes evaluate to `longer` during this call.
        """
        rows = zip(rows_of_chunks(program, longer), rows_of_chunks(program, self.lengths), strict=True)
        has_enough_rows = all(2 * longer_rows >= current_rows for longer_rows, current_rows in rows)
        return has_enough_rows and self.cost(program).peak <= self.available_bytes


def rows_of_chunks(program: Program, lengths: Lengths) -> list[int]:
    """Return the rows per chunk of each loop with an automatic chunk size, if the dynamic sizes have the values `lengths`."""
    specs = [loop.spec for loop in program.loops if isinstance(loop.spec.chunk_size, AutoChunk)]
    return [
        spec.chunk_size.rows(*map(lengths.evaluate, (spec.length, spec.chunk_size.row_bytes, spec.chunk_size.stream_bytes)))
        for spec in specs
    ]


def limit_rows(program: Program, lengths: Lengths) -> None:
    """Limit automatic chunk sizes, in place, to the rows per chunk that the program was simulated with at these lengths."""
    rows = iter(rows_of_chunks(program, lengths))
    for loop in program.loops:
        if isinstance(loop.spec.chunk_size, AutoChunk):
            loop.spec = replace(loop.spec, chunk_size=replace(loop.spec.chunk_size, max_rows=next(rows)))


def with_working_set(size: Any, working_set: int | None) -> Any:
    """Return an automatic chunk size with this working set; return other chunk sizes unchanged."""
    return replace(size, working_set=working_set) if isinstance(size, AutoChunk) and working_set is not None else size


def set_working_set(program: Program, working_set: int | None) -> None:
    """Set the working set, in bytes, of all loops with automatic chunk sizes."""
    for loop in program.loops:
        loop.spec = replace(loop.spec, chunk_size=with_working_set(loop.spec.chunk_size, working_set))


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
