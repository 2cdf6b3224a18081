"""Run a graph of two sequences as two graphs, one after the other, each with its own chunks.

An encoder's layers end before the decoder's begin. So the graph is split before one node into two *parts*, each compiled as a
separate graph. Values that the first part computes and the second reads are passed as between the graphs of a graph break, and
autograd passes their gradients back. A part may be split again. `Facts` are the results of the passes for one graph.
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
from streamfx.passes.partition.two_sequences import find_split
from streamfx.passes.partition.unchunked import GraphPair, is_worth_comparing
from streamfx.tools.report.fallback_reasons import check_strict
from streamfx.tools.report.notices import log_brief, predicted
from streamfx.tools.report.stage_table import place_loops
from streamfx.torch_private import dynamo_input_indices, is_sharded, mutated_inputs
from streamfx.torch_private.lines import source_line
from streamfx.torch_private.split import (
    GraphPart,
    example_input_of,
    may_write_to_inputs,
    requires_gradient,
    split_before,
    splits_for_ddp,
)

MIN_GAIN = 1.1  # minimum gain in memory for which a graph is retraced in two parts
MAX_SPLITS = 3  # maximum number of nested splits


class TwoSequencesError(Exception):
    """Raised during partitioning if a graph may take less memory in two parts than its `peak` bytes in one."""

    def __init__(self, split_node: fx.Node, peak: int) -> None:
        """Store the node with which the second part would begin, and the peak of the unsplit graph."""
        super().__init__(split_node, peak)
        self.split_node, self.peak = split_node, peak


class InseparableError(Exception):
    """Raised while a part is compiled if two graphs would behave differently from one."""


WRITES = "a part writes to its inputs, which the other part may have saved for its backward pass"
NOT_TRIED = (
    "or omit it: without a budget, this graph may run in two parts, one per sequence, split before {first_line}; with a budget, "
    "streamfx does not try that"
)
NO_GRADIENT = "the second part returns no gradient for a value of the first: its parameters would get zeros instead of None"


@dataclass(frozen=True)
class GraphSplit:
    """A graph in two parts, and the source line where the second part begins."""

    graph: fx.Graph
    parts: tuple[GraphPart, GraphPart]
    second_line: str

    @staticmethod
    def of(module: fx.GraphModule, node: fx.Node) -> GraphSplit:
        """Return the split of a module's graph before a node, the first operator of the second part."""
        return GraphSplit(module.graph, split_before(module, node), source_line(node))

    def inputs_of(self, part: GraphPart, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs with which a part is traced, given the `inputs` of the unsplit graph.

        Values that the other part computes are represented by Dynamo's example tensors.
        """
        values = dict(zip(self.graph.find_nodes(op="placeholder"), inputs, strict=True))
        return [values[node] if node in values else example_input_of(node) for node in part.inputs]

    def differentiable_inputs(self, outer: Collection[int]) -> list[frozenset[int]]:
        """Return, for each of the two parts, the indices of its inputs that need gradients and that another part computes.

        `outer` has such indices of the unsplit graph, if it is itself a part.
        """
        placeholders = self.graph.find_nodes(op="placeholder")
        computed = {node for i, node in enumerate(placeholders) if i in outer}
        computed |= {node for node in self.parts[0].results if requires_gradient(node)}
        return [frozenset(i for i, node in enumerate(part.inputs) if node in computed) for part in self.parts]

    def joined_callable(self, compiled_parts: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Any, ...]]:
        """Return a function that computes the graph's results from its inputs by running both parts."""
        placeholders = self.graph.find_nodes(op="placeholder")
        output = self.graph.output_node().args[0]

        def run(*inputs: Any) -> tuple[Any, ...]:
            """Run both parts on the graph's inputs."""
            values = dict(zip(placeholders, inputs, strict=True))
            for part, compiled in zip(self.parts, compiled_parts, strict=True):
                values.update(zip(part.results, compiled(*(values[node] for node in part.inputs)), strict=True))
            return tuple(values[item] if isinstance(item, fx.Node) else item for item in output)  # type: ignore[union-attr]

        return run


class SplittableCompilation(ABC):
    """A compilation that may be replaced by two parts, or that is one of them.

    `first_line` is the source line where a second part begins (empty for a first part). `num_splits` is the number of
    splits that led to this part. `differentiable_inputs` has the indices of inputs that another part computes and that
    need gradients. `on_one_rank` says that no other rank has a shard of the inputs. If the unchunked graph takes less
    memory than its loops, `unchunked_halves` has its forward and backward graphs.
    """

    module: fx.GraphModule
    options: Options
    facts: list[Facts]
    unchunked_halves: GraphPair | None
    report_no_gain: Callable[[Facts, Options], None]
    unchunked_builders: Sequence[Callable[[], GraphPair]] = ()  # functions that build its unchunked forward and backward graphs
    costs: Sequence[tuple[Cost, int]] = ()  # cost of a step and bytes of parameter gradients, for each part
    may_split, is_part, on_one_rank = True, False, False
    first_line, num_splits = "", 0
    split_search: tuple[Facts, fx.Node | None] | None = None  # facts, and the best node before which to split their graph
    differentiable_inputs: frozenset[int] = frozenset()

    @abstractmethod
    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph."""

    @abstractmethod
    def part_of(self, module: fx.GraphModule) -> SplittableCompilation:
        """Return a compilation of a part of the graph, with its own facts."""

    def is_on_one_rank(self, inputs: Sequence[Any]) -> bool:
        """Return whether no other rank takes part in the graph: it has no collectives, and no input is a shard.

        Otherwise no output may be deferred (recomputed at its use, which would wait for other ranks), and no graph may be split.
        """
        return not has_collectives(self.module.graph) and not any(map(is_sharded, inputs))

    def compile_in_parts_or_unchunked(self, inputs: list[Any], error: TwoSequencesError) -> Callable[..., Any]:
        """Return a callable that runs the graph in two parts if they take less memory; otherwise recompile the graph as one.

        `error` says where to split it.
        """
        run = try_step(lambda: self.compile_in_parts(inputs, error), None, NOT_SPLIT, strict=False)
        if run is not None:
            return run
        self.may_split = False
        return self.compile(inputs)

    def compile_in_parts(self, inputs: Sequence[Any], two_sequences: TwoSequencesError) -> Callable[..., Any] | None:
        """Return a callable that runs the graph in two parts, which were compiled before the comparison.

        Return None if they do not take `MIN_GAIN` times less memory than the unsplit graph (with `strict`: not more), or if a
        part cannot be compiled alone.
        """
        split = GraphSplit.of(self.module, two_sequences.split_node)
        parts = [self.part_of(part.module) for part in split.parts]
        for part, first_line in zip(parts, (self.first_line, split.second_line), strict=True):
            part.is_part, part.first_line, part.num_splits = True, first_line, self.num_splits + 1
        for part, input_indices in zip(parts, split.differentiable_inputs(self.differentiable_inputs), strict=True):
            part.differentiable_inputs = input_indices
        parts[0].options = replace(parts[0].options, outputs="dense")  # the second part reads them
        try:
            compiled_parts = [
                part.compile(split.inputs_of(graph_part, inputs)) for part, graph_part in zip(parts, split.parts, strict=True)
            ]
        except (NotStreamedError, InseparableError) as error:
            log.info("a graph of two sequences is not split before %s: %r", split.second_line, error)
            return None
        costs = [cost for part in parts for cost in part.costs]
        peak = peak_of_calls(*zip(*costs, strict=True))
        log.info("split before %s, a graph takes %d bytes; unsplit %d", split.second_line, peak, two_sequences.peak)
        if (1.0 if self.options.strict else MIN_GAIN) * peak > two_sequences.peak:
            return None
        self.replace_by(parts)
        return split.joined_callable(compiled_parts)

    def replace_by(self, parts: Sequence[SplittableCompilation]) -> None:
        """Record the facts and costs of two parts as this graph's facts and costs, because the parts run in its place."""
        self.costs = [cost for part in parts for cost in part.costs]
        for facts in (facts for part in parts for facts in part.facts):
            self.register_facts(facts)

    def record_facts(self, facts: Facts) -> None:
        """Record the final facts of this graph, with its first source line and the stage of each loop, and its cost."""
        facts = replace(facts, first_line=self.first_line)
        place_loops(facts)
        self.costs = self.part_costs(facts)
        self.register_facts(facts)

    def register_facts(self, facts: Facts) -> None:
        """Append the facts of a graph to `self.facts`.

        Unless it is a part, which may be discarded, also log them, and add Dynamo guards for the lengths of its plan.
        """
        self.facts.append(facts)
        if self.is_part:
            return
        log_brief(facts)
        if facts.joint.tangents and facts.fits is None:
            self.report_no_gain(facts, self.options)
        if facts.lengths:
            log.info("this plan holds for %s; a longer call gets a new plan", facts.lengths)
            facts.lengths.guard(facts.joint.graph)

    def part_costs(self, facts: Facts) -> Sequence[tuple[Cost, int]]:
        """Return [(cost of a step, bytes of parameter gradients)] for a part; an empty list for a graph that is not a part."""
        return [(self.cost_of(facts), bytes_of_parameters(facts.joint))] if self.is_part else ()

    def cost_of(self, facts: Facts) -> Cost:
        """Return the cost of a training step through the graph as it runs: in loops if it has a program, else unchunked."""
        if self.unchunked_halves is None and facts.program is not None:
            return predicted(facts)
        return cost_of(*(self.unchunked_halves or self.unchunked_builders[0]()), len(facts.joint.outputs))

    def raise_if_splittable(self, chunked_facts: Facts) -> None:
        """Raise `TwoSequencesError` if the graph has two sequences, and a step is so large that two parts are worth a trial.

        `chunked_facts` are the facts of its loops.
        """
        split_node = self.find_split(chunked_facts)
        if split_node is not None and is_worth_comparing(peak := self.cost_of(chunked_facts).peak):
            raise TwoSequencesError(split_node, peak)

    def find_split(self, facts: Facts) -> fx.Node | None:
        """Return the best node before which to split the graph; None with a memory budget, or if it may not be split."""
        if self.split_search is None or self.split_search[0] is not facts:  # `check_strict` searches the same facts
            self.split_search = facts, None if self.options.memory_budget is not None else self.find_split_without_budget(facts)
        return self.split_search[1]

    def find_split_without_budget(self, facts: Facts) -> fx.Node | None:
        """Return the best node before which to split the graph, as if there were no memory budget.

        None if it has one sequence or no program, or may not be split: other ranks take part, DDP splits it, it results from
        `MAX_SPLITS` splits, or gradients of recurrences are truncated.
        """
        may_split = self.may_split and self.on_one_rank and self.num_splits < MAX_SPLITS and not splits_for_ddp()
        is_truncated = self.options.adjoints != "exact"
        if not may_split or is_truncated or facts.program is None or facts.program.backward is None:
            return None
        find = partial(find_split, facts, self.module.graph, lambda: predicted(facts).peak)
        return try_step(find, None, NOT_SPLIT, strict=False)

    def mention_untried_split(self, error: OverBudgetError, capture: Callable[[], Facts]) -> OverBudgetError:
        """Return the error, or a copy whose remedy says that the graph could run in two parts without a memory budget.

        To find that out, the passes run again on the facts that `capture` returns.
        """
        without_budget = replace(self.options, memory_budget=None)
        split_node = try_step(
            lambda: self.find_split_without_budget(run_pipeline(capture, without_budget)), None, NOT_SPLIT, strict=False
        )
        if split_node is None:
            return error
        remedy = f"{error.do}; {NOT_TRIED.format(first_line=source_line(split_node))}"
        extended = OverBudgetError(error.asked, error.found, error.where, remedy)
        extended.smallest, extended.terms = error.smallest, error.terms
        return extended

    def check_strict(self, facts: Facts) -> None:
        """Raise under `strict=True` if an operator is not chunked, unless the graph may be split: its parts are then checked."""
        if self.options.strict and self.find_split(facts) is None:
            check_strict(facts, self.options)

    def check_part(self, joint: JointGraph | None = None) -> None:
        """Raise `InseparableError` for a part of a split graph if it would behave differently from the unsplit graph.

        It may not write to its inputs, and must return a gradient for each input that needs one and that another part computes.
        `joint` is its forward and backward graph, None in inference. Do nothing for a graph that is not a part.
        """
        if not self.is_part:
            return
        if may_write_to_inputs() if joint is None else mutated_inputs(joint.graph) != []:
            raise InseparableError(WRITES)
        dynamo_indices = [] if joint is None else dynamo_input_indices(joint.graph, len(joint.primals))
        trained = [] if joint is None else [primal for _, primal, _ in joint.trained]
        inputs_with_gradient = {dynamo_indices[joint.inputs.index(primal)] for primal in trained} if joint is not None else set()
        if not self.differentiable_inputs <= inputs_with_gradient:
            raise InseparableError(NO_GRADIENT)
