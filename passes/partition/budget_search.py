"""Search for the fastest plan whose peak memory stays within the budget.

Candidates that cost no time come first: large chunks, and attention results kept. Then come those that cost some time:
attention recomputed, and stages between boundaries recomputed. Each candidate is built and simulated, so the simulated
program is the one that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

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
        """Return the facts with the fastest plan that fits, for longer inputs than the call's if possible.

        Raise `OverBudgetError` if no plan fits.
        """
        budget = self.options.memory_budget
        if budget is None or facts.program is None:
            return facts
        current_lengths = Lengths.of_current_call(facts.joint.graph)
        held = held_bytes(facts.program.forward.graph)
        size = budget_bytes(budget, device_of(facts.joint.graph), held, gradient_bytes(facts.joint.gradients))
        for lengths in current_lengths.with_headroom() if current_lengths else (current_lengths,):
            search = _BudgetSearch(facts, self.options, self.rewrite, size, lengths)
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
    """Return the bytes of a graph's inputs, including parameters, except those in `omitted`."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if node not in omitted)
    return sum(bytes_like(node.meta[VALUE]) for node in inputs if VALUE in node.meta)


def kept_bytes(facts: Facts) -> int:
    """Return the bytes that a plan keeps on the device in addition to stage outputs."""
    waiting = {node for nodes in facts.plan.offloaded for node in nodes}
    return sum(bytes_like(node.meta[VALUE]) for nodes in facts.plan.kept for node in nodes if node not in waiting)


@dataclass
class _BudgetSearch:
    """Searches for the fastest plan within a budget, for inputs of these lengths; caches plans and costs."""

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
        after the first one that fits, while candidates are faster than the previous one.
        """
        fallback: tuple[Candidate, Facts] | None = None
        fastest: tuple[float, Facts, int | None] | None = None
        for candidate in self.candidates():
            facts = self.facts_with_program(candidate)
            program = known(facts.program)
            min_set, efficient_set = self.working_sets(program)
            cost = self.simulate(candidate, program, efficient_set)
            if cost.peak <= self.available_bytes:
                size = self.largest_working_set(candidate, program, efficient_set, cost)
                seconds = self.seconds(self.simulate(candidate, program, size))
                if fastest is not None and seconds >= fastest[0]:
                    break
                fastest = seconds, facts, size
            elif fastest is not None:
                break
            elif efficient_set != min_set and fallback is None:
                cost = self.simulate(candidate, program, min_set)
                if cost.peak <= self.available_bytes:
                    fallback = candidate, facts
        if fastest is not None:
            return self.with_chosen_plan(*fastest[1:])
        if fallback is None:
            raise over_budget_error(self.budget, self.held, self.smallest)
        candidate, facts = fallback
        return self.with_chosen_plan(facts, self.largest_below_efficient(candidate, known(facts.program)))

    def seconds(self, cost: Cost) -> float:
        """Estimate the duration of a step with fused element-wise operators."""
        work = cost.work.compiled
        return rates_of(device_of(self.facts.joint.graph)).seconds(work.flops, work.moved + work.total_bytes, work.launches)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the candidates that the options allow, the fastest first, except those that clearly exceed the budget."""
        count = len(self.facts.stages)
        save = self.min_level if self.options.save == "auto" else self.options.save
        if InterloopValues(self.facts).has_exchanges:  # the sizes of one rank must not decide how often ranks exchange rows
            yield Candidate(save, 1 if self.options.keep_every == "auto" else self.options.keep_every)
            return
        every = [k for k in KEEP_EVERY if k < max(count, 2)] if self.options.keep_every == "auto" else [self.options.keep_every]
        if self.options.save == "auto":
            yield from self.candidates_keeping_more(every[0])
        yield Candidate(save, every[0])
        several = [Candidate(save, k) for k in every[1:]]
        peaks = [self.estimate(candidate, count) for candidate in several]
        for candidate, peak in zip(several, peaks, strict=True):
            if peak <= self.available_bytes * ESTIMATE_TOLERANCE or peak == min(peaks):
                yield candidate

    def candidates_keeping_more(self, every: int) -> Iterator[Candidate]:
        """Yield candidates that keep more values than the options require and may fit, those with the most values first."""
        program = known(self.facts.program)
        base = self.simulate(Candidate(self.min_level, every), program, self.working_sets(program)[1])
        by_kept: dict[Any, Candidate] = {}
        for level in SAVE_LEVELS[SAVE_LEVELS.index(self.min_level) + 1 :]:
            candidate = Candidate(level, every)
            planned = self.facts_with_plan(candidate)
            if base.peak + kept_bytes(planned) <= self.available_bytes * ESTIMATE_TOLERANCE:
                by_kept.setdefault(planned.plan.kept, candidate)
        yield from [candidate for kept, candidate in by_kept.items() if any(kept)][::-1]

    def estimate(self, candidate: Candidate, count: int) -> int:
        """Return an estimate of the peak with fewer boundaries, from the smallest simulated peak, with all boundaries."""
        cost, k = self.smallest, candidate.keep_every
        kept_share = min(1, 1 / k + (k - 1) / max(count, 1))
        return int(cost.peak - cost.peak_terms.get(STAGE_INPUTS, 0) * (1 - kept_share))

    @property
    def smallest(self) -> Cost:
        """The simulated cost with the smallest peak."""
        return min((cost for _, cost in self.costs), key=lambda cost: cost.peak)

    @property
    def min_level(self) -> str:
        return min_save_level(self.options.offload)

    def with_choices(self, candidate: Candidate) -> Options:
        """Return the options with the saved values and boundaries of a candidate."""
        return replace(self.options, save=candidate.save, keep_every=candidate.keep_every)  # type: ignore[arg-type]

    def facts_with_plan(self, candidate: Candidate) -> Facts:
        """Return the facts with the plan of a candidate, without its program."""
        if candidate not in self.plans:
            self.plans[candidate] = ChunkPlan(self.with_choices(candidate), self.chunk_sizes).apply(self.facts)
        return self.plans[candidate]

    @cached_property
    def chunk_sizes(self) -> tuple[ChunkSize, ...]:
        """Chunk sizes before a working set is chosen; the same for all candidates."""
        return chunk_sizes(self.facts, self.options)

    def facts_with_program(self, candidate: Candidate) -> Facts:
        """Return the facts with the plan and program of a candidate; the given facts if its plan is equal."""
        planned = self.facts_with_plan(candidate)
        current_plan, new_plan = self.facts.plan, planned.plan
        return (
            self.facts
            if (current_plan.kept, current_plan.dropped) == (new_plan.kept, new_plan.dropped)
            else self.rewrite(planned)
        )

    @property
    def held(self) -> int:
        return held_bytes(known(self.facts.program).forward.graph)

    @property
    def available_bytes(self) -> int:
        """The budget without the bytes of parameters and inputs."""
        return self.budget - self.held

    def working_sets(self, program: Program) -> tuple[int | None, int | None]:
        """Return the working sets, in bytes, of the smallest and of efficient chunk sizes; None if chunk sizes are fixed."""
        automatic = [loop.spec.chunk_size for loop in program.loops if isinstance(loop.spec.chunk_size, AutoChunk)]
        if not automatic:
            return None, None
        row = max(self.lengths.evaluate(chunk.row_bytes) for chunk in automatic)
        rows = min(self.length, max(MIN_ROWS, EFFICIENT_TOKENS * self.length // tokens(self.facts)))
        return row * min(self.length, MIN_ROWS // 4), row * rows

    @property
    def length(self) -> int:
        """The sequence length, at least 1."""
        return sequence_length(self.facts) or 1

    def largest_working_set(self, candidate: Candidate, program: Program, size: int | None, cost: Cost) -> int | None:
        """Return the largest working set, in bytes, that a few simulations find to fit; None if chunk sizes are fixed.

        `size` fits, with this `cost`. Trials extrapolate from the memory that is left, or bisect after one has failed.
        """
        if size is None:
            return None
        automatic = [loop.spec.chunk_size for loop in program.loops if isinstance(loop.spec.chunk_size, AutoChunk)]
        max_working_set = max(self.lengths.evaluate(chunk.row_bytes) for chunk in automatic) * self.length
        low, high, has_failed = size, max_working_set, False
        for _ in range(MAX_STEPS):
            work = max(cost.peak_terms.get(CHUNK, 0) + cost.peak_terms.get(LOSS, 0), low // 8)
            aim = low + int(MARGIN * (self.available_bytes - cost.peak) * low / work)
            trial = aim if aim < high else math.isqrt(low * high) if has_failed else high
            if trial < low * MIN_GROWTH:
                break
            larger = self.simulate(candidate, program, trial)
            if larger.peak <= self.available_bytes:
                low, cost = trial, larger
            else:
                high, has_failed = trial, True
        return low

    def largest_below_efficient(self, candidate: Candidate, program: Program) -> int:
        """Return the largest working set that fits, below the working set of efficient chunks."""
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
        """Simulate a step with chunks of this working set, and cache the cost."""
        set_working_set(program, working_set)
        cached = next((cost for candidates, cost in self.costs if candidates == (candidate, working_set)), None)
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
        """Return the facts with the chosen plan, its working set, and the lengths for which it is valid."""
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
        """Return whether a program also fits at longer lengths, with at least half as many rows per chunk."""
        rows = zip(rows_of_chunks(program, longer), rows_of_chunks(program, self.lengths), strict=True)
        return (
            all(2 * longer_rows >= current_rows for longer_rows, current_rows in rows)
            and self.cost(program).peak <= self.available_bytes
        )


def rows_of_chunks(program: Program, lengths: Lengths) -> list[int]:
    """Return the rows per chunk of loops with automatic chunk sizes."""
    chunks = [loop.spec for loop in program.loops if isinstance(loop.spec.chunk_size, AutoChunk)]
    return [
        spec.chunk_size.rows(*map(lengths.evaluate, (spec.length, spec.chunk_size.row_bytes, spec.chunk_size.stream_bytes)))
        for spec in chunks
    ]


def limit_rows(program: Program, lengths: Lengths) -> None:
    """Limit automatic chunk sizes to the rows with which the program was simulated, at these lengths."""
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
    """Return the error for a budget below the smallest peak, with the largest parts of the peak and a remedy."""
    terms = {PARAMETERS: held, **cost.peak_terms}
    sorted_terms = sorted(terms.items(), key=lambda item: -item[1])
    largest_terms = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted_terms[:4] if size)
    remedy = REMEDIES.get(sorted_terms[0][0], "a shorter sequence or a smaller batch")
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
