"""Build and simulate the plans that the search for a memory budget compares.

A *candidate* is a level of values to keep (`save`) and how many stages share one stored boundary (`keep_every`); a mixed
candidate plans its last stages like a richer one, which keeps more. *Limits* are the bytes of intermediate values of a chunk,
for the stage of the head and the loss and for the others: an automatic chunk size (`AutoChunk`) has as many rows as fit into
its limit. *Held* bytes are the parameters and inputs, which no plan can save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from streamfx.budget import format_bytes
from streamfx.cost.categories import loss_values
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, bytes_like, cost_of
from streamfx.cost.rates import Rates, rates_of
from streamfx.cost.sampling import LoopRun
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import device_of
from streamfx.ir.program import LoopSpec, Program
from streamfx.ir.search_trace import Candidate, ChunkLimits, SimulatedCandidate
from streamfx.ir.stage_plan import AutoChunk, ChunkSize, StagePlan
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import Options
from streamfx.passes.partition.chunk_plan import ChunkPlan
from streamfx.passes.partition.chunk_sizes import chunk_sizes
from streamfx.passes.partition.interloop_values import InterloopValues


@dataclass
class PlanSimulator:
    """Builds the programs of candidates and simulates them, for inputs of these lengths; caches plans, programs and costs.

    `facts` have the plan and program of the default options; `rewrite` builds the program of another plan.
    """

    facts: Facts
    options: Options
    rewrite: Callable[[Facts], Facts]
    lengths: Lengths
    simulated: list[SimulatedCandidate] = field(default_factory=list)
    _costs: dict[tuple[Candidate, tuple[int, ...]], Cost] = field(default_factory=dict)  # by candidate and rows per chunk
    _plans: dict[Candidate, Facts] = field(default_factory=dict)
    _programs: dict[Candidate, Facts] = field(default_factory=dict)
    _known_runs: dict[Any, LoopRun] = field(default_factory=dict)  # equal loops of all candidates are simulated once

    def facts_with_plan(self, candidate: Candidate) -> Facts:
        """Return the facts with the plan of a candidate, but not its program."""
        if candidate not in self._plans:
            self._plans[candidate] = self._mix(candidate) if candidate.richer is not None else self._plan(candidate)
        return self._plans[candidate]

    def _plan(self, candidate: Candidate) -> Facts:
        """Plan all stages with a candidate's `save` and `keep_every`."""
        options = replace(self.options, save=candidate.save, keep_every=candidate.keep_every)  # type: ignore[arg-type]
        return ChunkPlan(options, self._chunk_sizes).apply(self.facts)

    def _mix(self, candidate: Candidate) -> Facts:
        """Plan the last stages like `candidate.richer`, and the others like the candidate without it."""
        facts, richer = (
            self.facts_with_plan(plan) for plan in (replace(candidate, num_richer=0, richer=None), known(candidate.richer))
        )
        chosen = stages_that_differ(facts.plan, richer.plan)[-candidate.num_richer :]
        kept, dropped = (
            tuple(rich if stage in chosen else poor for stage, (poor, rich) in enumerate(zip(*sides, strict=True)))
            for sides in zip(by_stage(facts.plan), by_stage(richer.plan), strict=True)
        )
        recomputed = InterloopValues(facts).recomputed_values(facts.stages, kept)
        plan = replace(facts.plan, kept=kept, dropped=dropped if any(dropped) else (), recomputed=recomputed)
        return replace(facts, found_plan=plan)

    @cached_property
    def _chunk_sizes(self) -> tuple[ChunkSize, ...]:
        """The chunk size of each stage before limits are chosen; the same for all candidates."""
        return chunk_sizes(self.facts, self.options)

    def facts_with_program(self, candidate: Candidate) -> Facts:
        """Return the facts with the plan and program of a candidate; `self.facts`, which have both, if its plan is equal."""
        if candidate not in self._programs:
            planned = self.facts_with_plan(candidate)
            is_equal = by_stage(self.facts.plan) == by_stage(planned.plan)
            self._programs[candidate] = self.facts if is_equal else self.rewrite(planned)
        return self._programs[candidate]

    def program(self, candidate: Candidate) -> Program:
        """Return the program of a candidate."""
        return known(self.facts_with_program(candidate).program)

    @cached_property
    def held(self) -> int:
        """The bytes of parameters and inputs."""
        return held_bytes(known(self.facts.program).forward.graph)

    @property
    def length(self) -> int:
        """The sequence length, at least 1."""
        return sequence_length(self.facts) or 1

    def row_bytes(self, is_loss: bool) -> int:
        """Return the largest bytes of work per row of the automatic chunk sizes of a kind of stage; 0 if there are none."""
        chunks = [loop.spec.chunk_size for loop in known(self.facts.program).loops]
        automatic = [chunk for chunk in chunks if isinstance(chunk, AutoChunk) and chunk.is_loss == is_loss]
        return max((self.lengths.evaluate(chunk.row_bytes) for chunk in automatic), default=0)

    @property
    def has_automatic_chunks(self) -> bool:
        """Whether any loop has an automatic chunk size."""
        return bool(_automatic(known(self.facts.program)))

    def limits_for(self, layers: int, loss: int) -> ChunkLimits | None:
        """Return limits at which chunks have about so many rows; None if no loop has an automatic chunk size."""
        if not self.has_automatic_chunks:
            return None
        return ChunkLimits(self.row_bytes(is_loss=False) * layers, self.row_bytes(is_loss=True) * loss)

    def simulate(self, candidate: Candidate, layers: int, loss: int) -> Cost:
        """Return the cost of a step with about so many rows per chunk, in layers and in the head; it is recorded in `simulated`.

        Sets the limits of the program's loops.
        """
        program, limits = self.program(candidate), self.limits_for(layers, loss)
        set_limits(program, limits)
        key = candidate, tuple(rows_of_chunks(program, self.lengths))
        if key not in self._costs:
            self._costs[key] = cost = self.cost(program)
            self.simulated.append(SimulatedCandidate(candidate, limits, cost.peak + self.held))
            log.debug("%s, %s of work: peak %s", candidate, limits, format_bytes(cost.peak + self.held))
        return self._costs[key]

    def cost(self, program: Program) -> Cost:
        """Simulate a step of the program and return its cost."""
        loss, num_outputs = loss_values(self.facts), len(self.facts.joint.outputs)
        return cost_of(program.forward, program.backward, num_outputs, loss, known_runs=self._known_runs)

    def seconds(self, cost: Cost) -> float:
        """Estimate the duration of a step in seconds, from its FLOPs, bytes moved and kernels, if Inductor compiles its loops."""
        work = cost.work.compiled
        return self._rates.seconds(work.flops, work.moved + work.total_bytes, work.launches)

    def seconds_of_flops(self, cost: Cost) -> float:
        """Estimate the seconds of a step's FLOPs alone."""
        return self._rates.seconds(cost.work.compiled.flops)

    @cached_property
    def _rates(self) -> Rates:
        """The speeds of the device."""
        return rates_of(device_of(self.facts.joint.graph))


def by_stage(plan: StagePlan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the values that each stage keeps, and those that it drops (empty tuples if it drops none)."""
    return plan.kept, plan.dropped or ((),) * len(plan.kept)


def stages_that_differ(plan: StagePlan, other: StagePlan) -> list[int]:
    """Return the indices of the stages that keep or drop other values in the other plan."""
    pairs = zip(zip(*by_stage(plan), strict=True), zip(*by_stage(other), strict=True), strict=True)
    return [stage for stage, (own, others) in enumerate(pairs) if own != others]


def held_bytes(graph: fx.Graph, omitted: Collection[fx.Node] = ()) -> int:
    """Return the bytes of a graph's inputs, including parameters, except those in `omitted`; a step holds them in any case."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if node not in omitted)
    return sum(bytes_like(node.meta[VALUE]) for node in inputs if VALUE in node.meta)


def kept_bytes(facts: Facts) -> int:
    """Return the bytes of the forward values that a plan keeps on the device for backward, in addition to stage outputs."""
    offloaded = {node for nodes in facts.plan.offloaded for node in nodes}
    return sum(bytes_like(node.meta[VALUE]) for nodes in facts.plan.kept for node in nodes if node not in offloaded)


def _automatic(program: Program) -> Sequence[tuple[LoopSpec, AutoChunk]]:
    """Return the specifications of the loops with an automatic chunk size, and that chunk size."""
    specs = [loop.spec for loop in program.loops]
    return [(spec, spec.chunk_size) for spec in specs if isinstance(spec.chunk_size, AutoChunk)]


def rows_of_chunks(program: Program, lengths: Lengths) -> list[int]:
    """Return the rows per chunk of each loop with an automatic chunk size, if the dynamic sizes have the values `lengths`."""
    return [
        chunk.rows(*map(lengths.evaluate, (spec.length, chunk.row_bytes, chunk.stream_bytes)))
        for spec, chunk in _automatic(program)
    ]


def limit_rows(program: Program, lengths: Lengths) -> None:
    """Limit automatic chunk sizes, in place, to the rows per chunk that the program was simulated with at these lengths."""
    rows = iter(rows_of_chunks(program, lengths))
    for loop in program.loops:
        if isinstance(loop.spec.chunk_size, AutoChunk):
            loop.spec = replace(loop.spec, chunk_size=replace(loop.spec.chunk_size, max_rows=next(rows)))


def with_limits(size: ChunkSize, limits: ChunkLimits | None) -> ChunkSize:
    """Return an automatic chunk size with its limit; return other chunk sizes unchanged."""
    if limits is None or not isinstance(size, AutoChunk):
        return size
    return replace(size, working_set=limits.loss if size.is_loss else limits.layers)


def set_limits(program: Program, limits: ChunkLimits | None) -> None:
    """Set the limits of all loops with automatic chunk sizes, in place."""
    for loop in program.loops:
        chunk_size = with_limits(loop.spec.chunk_size, limits)
        if chunk_size != loop.spec.chunk_size:
            loop.spec = replace(loop.spec, chunk_size=chunk_size)
