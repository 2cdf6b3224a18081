"""Run a graph of two sequences as two graphs, one after the other, each with its own chunks.

An encoder's layers end before the decoder's begin. Values that the first graph computes and the second reads are
passed as between the graphs of a graph break, and autograd passes their gradients back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from streamfx.cost.call_order import bytes_of_parameters, peak_of_calls
from streamfx.cost.memory import Cost, cost_of
from streamfx.errors import NotStreamedError, OverBudgetError
from streamfx.fallbacks import NOT_SPLIT, try_step
from streamfx.ir.facts import Facts
from streamfx.ir.joint import JointGraph
from streamfx.log import log
from streamfx.options import Options
from streamfx.passes import run_pipeline
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.partition.two_sequences import where_to_split
from streamfx.passes.partition.unchunked import Halves, is_compared
from streamfx.tools.report.fallback_reasons import check_strict
from streamfx.tools.report.notices import log_brief, predicted
from streamfx.torch_private import given_positions, is_sharded, mutated_inputs
from streamfx.torch_private.lines import source_line
from streamfx.torch_private.split import (
    GraphPart,
    asks_gradient,
    may_write_to_inputs,
    split_in_front_of,
    splits_for_ddp,
    stand_in,
)

GAIN = 1.1  # minimum gain in memory for which a graph is retraced in two parts
MOST = 3  # maximum number of nested splits


class TwoSequencesError(Exception):
    """Raised during partitioning if a graph may take less memory in two parts than its `peak` bytes in one."""

    def __init__(self, place: fx.Node, peak: int) -> None:
        """Report that the second part would begin at `place`."""
        super().__init__(place, peak)
        self.place, self.peak = place, peak


class InseparableError(Exception):
    """Raised while a part is compiled if two graphs would behave differently from one."""


WRITES = "a part writes to what it is given: the other part may have saved it for its backward half"
NOT_TRIED = (
    "or leave it out: without a budget this graph may run in two parts, of one sequence each, split in front of {begins}; within "
    "one that is not tried"
)
NO_GRADIENT = "the second part has no gradient for what the first one hands on: zeros would reach its parameters, and not None"


@dataclass(frozen=True)
class GraphSplit:
    """A graph in two parts, and the source line where the second part begins."""

    graph: fx.Graph
    parts: tuple[GraphPart, GraphPart]
    begins: str

    @staticmethod
    def of(module: fx.GraphModule, place: fx.Node) -> GraphSplit:
        """Split a module in front of a node."""
        return GraphSplit(module.graph, split_in_front_of(module, place), source_line(place))

    def inputs_of(self, part: GraphPart, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs with which a part is traced."""
        values = dict(zip(self.graph.find_nodes(op="placeholder"), inputs, strict=True))
        return [values[node] if node in values else stand_in(node) for node in part.given]

    def handed_on(self, already: Collection[int]) -> list[frozenset[int]]:
        """Return the indices of each part's inputs that need gradients and are computed, here or `already` before."""
        placeholders = self.graph.find_nodes(op="placeholder")
        computed = {node for i, node in enumerate(placeholders) if i in already}
        computed |= {node for node in self.parts[0].results if asks_gradient(node)}
        return [frozenset(i for i, node in enumerate(part.given) if node in computed) for part in self.parts]

    def run_by(self, runs: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Any, ...]]:
        """Return a function that maps the graph's inputs to its results by running both parts."""
        placeholders = self.graph.find_nodes(op="placeholder")
        output = self.graph.output_node().args[0]

        def run(*arguments: Any) -> tuple[Any, ...]:
            """Run both parts on the graph's inputs."""
            values = dict(zip(placeholders, arguments, strict=True))
            for part, compiled in zip(self.parts, runs, strict=True):
                values.update(zip(part.results, compiled(*(values[node] for node in part.given)), strict=True))
            return tuple(values[item] if isinstance(item, fx.Node) else item for item in output)  # type: ignore[union-attr]

        return run


class SplittableCompilation(ABC):
    """A compilation that may be replaced by two parts, or that is one of them.

    `begins` is the source line where a second part begins, `splits` is the number of splits that led to this part,
    `handed_on` has the indices of inputs that another part computes and that need gradients. `inputs_are_own` says
    that no other rank has a shard of the inputs. If the unchunked graph takes less memory than its loops, `standing`
    has its forward and backward graphs.
    """

    module: fx.GraphModule
    options: Options
    facts: list[Facts]
    standing: Halves | None
    tell: Callable[[Facts, Options], None]
    ways: Sequence[Callable[[], Halves]] = ()  # functions that build its unchunked forward and backward graphs
    costs: Sequence[tuple[Cost, int]] = ()  # cost of a step and bytes of parameter gradients, for each part
    may_split, is_part, inputs_are_own = True, False, False
    begins, splits = "", 0
    sought: tuple[Facts, fx.Node | None] | None = None  # these facts, and the best place to split their graph
    handed_on: frozenset[int] = frozenset()

    @abstractmethod
    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]: ...

    @abstractmethod
    def part_of(self, module: fx.GraphModule) -> SplittableCompilation:
        """Return a compilation of a part of the graph, with its own facts."""

    def is_alone(self, inputs: Sequence[Any]) -> bool:
        """Return whether no other rank takes part: using a deferred output would otherwise wait for it."""
        return not has_collectives(self.module.graph) and not any(map(is_sharded, inputs))

    def in_parts_or_whole(self, inputs: list[Any], error: TwoSequencesError) -> Callable[..., Any]:
        """Return the graph in two parts if they take less memory; otherwise recompile it as one."""
        run = try_step(lambda: self.in_parts(inputs, error), None, NOT_SPLIT, strict=False)
        if run is not None:
            return run
        self.may_split = False
        return self.compile(inputs)

    def in_parts(self, inputs: Sequence[Any], two_sequences: TwoSequencesError) -> Callable[..., Any] | None:
        """Return the graph in two parts; None if they do not take less memory, or the graph cannot be split."""
        split = GraphSplit.of(self.module, two_sequences.place)
        parts = [self.part_of(part.module) for part in split.parts]
        for part, part_begins in zip(parts, (self.begins, split.begins), strict=True):
            part.is_part, part.begins, part.splits = True, part_begins, self.splits + 1
        parts[0].handed_on, parts[1].handed_on = split.handed_on(self.handed_on)
        parts[0].options = replace(parts[0].options, outputs="dense")  # the second part reads them
        try:
            runs = [
                part.compile(split.inputs_of(graph_part, inputs)) for part, graph_part in zip(parts, split.parts, strict=True)
            ]
        except (NotStreamedError, InseparableError) as error:
            log.info("a graph of two sequences is not split in front of %s: %r", split.begins, error)
            return None
        costs = [cost for part in parts for cost in part.costs]
        peak = peak_of_calls(*zip(*costs, strict=True))
        log.info("split in front of %s a graph takes %d bytes, in one part %d", split.begins, peak, two_sequences.peak)
        if (1.0 if self.options.strict else GAIN) * peak > two_sequences.peak:
            return None
        self.take(parts)
        return split.run_by(runs)

    def take(self, parts: Sequence[SplittableCompilation]) -> None:
        """Replace the graph by two parts."""
        self.costs = [cost for part in parts for cost in part.costs]
        for facts in (facts for part in parts for facts in part.facts):
            self.keep(facts)

    def keep(self, facts: Facts) -> None:
        """Record the facts of a graph. Unless it is a part, also log them, and guard the lengths of its plan."""
        self.facts.append(facts)
        if self.is_part:
            return
        log_brief(facts)
        if facts.joint.tangents and facts.fits is None:
            self.tell(facts, self.options)
        if facts.lengths:
            log.info("this plan holds for %s; a longer call is planned again", facts.lengths)
            facts.lengths.guard(facts.joint.graph)

    def priced(self, facts: Facts) -> Sequence[tuple[Cost, int]]:
        """Return a part's cost and the bytes of its parameters' gradients; empty for a graph that is not a part."""
        return [(self.cost_of(facts), bytes_of_parameters(facts.joint))] if self.is_part else ()

    def cost_of(self, facts: Facts) -> Cost:
        """Return the cost of a step through the graph, in loops or unchunked."""
        if self.standing is None and facts.program is not None:
            return predicted(facts)
        return cost_of(*(self.standing or self.ways[0]()), len(facts.joint.outputs))

    def raise_if_two(self, in_loops: Facts) -> None:
        """Raise `TwoSequencesError` if a graph that could run may take less memory in two parts."""
        place = self.place_to_split(in_loops)
        if place is not None and is_compared(peak := self.cost_of(in_loops).peak):
            raise TwoSequencesError(place, peak)

    def place_to_split(self, facts: Facts) -> fx.Node | None:
        """Return the best place to split the graph; None with a memory budget, or if ranks have to agree."""
        if self.sought is None or self.sought[0] is not facts:  # `strict=True` asks for it, too
            self.sought = facts, None if self.options.memory_budget is not None else self.place_without_budget(facts)
        return self.sought[1]

    def place_without_budget(self, facts: Facts) -> fx.Node | None:
        """Return the place to split the graph if there were no memory budget."""
        may_split = self.may_split and self.inputs_are_own and self.splits < MOST and not splits_for_ddp()
        asks = self.options.adjoints != "exact"
        if not may_split or asks or facts.program is None or facts.program.backward is None:
            return None
        find = partial(where_to_split, facts, self.module.graph, lambda: predicted(facts).peak)
        return try_step(find, None, NOT_SPLIT, strict=False)

    def told_of_split(self, error: OverBudgetError, capture: Callable[[], Facts]) -> OverBudgetError:
        """Return the error, with a note that no split was tried if one exists without a budget."""
        without_budget = replace(self.options, memory_budget=None)
        place = try_step(lambda: self.place_without_budget(run_pipeline(capture, without_budget)), None, NOT_SPLIT, strict=False)
        if place is None:
            return error
        extended = OverBudgetError(
            error.asked, error.found, error.where, f"{error.do}; {NOT_TRIED.format(begins=source_line(place))}"
        )
        extended.smallest, extended.terms = error.smallest, error.terms
        return extended

    def check_strict(self, facts: Facts) -> None:
        """Raise under `strict=True` if an operator is not chunked, unless it may be chunked in two parts."""
        if self.options.strict and self.place_to_split(facts) is None:
            check_strict(facts, self.options)

    def check_part(self, joint: JointGraph | None = None) -> None:
        """Refuse a part that writes to its inputs, or lacks a gradient for one; `joint` is None in inference."""
        if not self.is_part:
            return
        if may_write_to_inputs() if joint is None else mutated_inputs(joint.graph) != []:
            raise InseparableError(WRITES)
        positions = [] if joint is None else given_positions(joint.graph, len(joint.primals))
        driven = set() if joint is None else {positions[joint.inputs.index(primal)] for _, primal, _ in joint.trained}
        if not self.handed_on <= driven:
            raise InseparableError(NO_GRADIENT)
