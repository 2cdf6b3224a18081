"""The entry point of `torch.compile(model, backend="streambp")`.

A graph runs as *host programs* (forward and backward graphs with loops over chunks of the sequence), or *unchunked* (compiled
by Inductor, or partitioned by AOTAutograd) if that fits the memory budget or takes less memory. `Facts` are the results of the
passes for one graph. *Deferred* outputs (lazy logits) are not in the graph: they are recomputed when the caller uses them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from streamfx import fallbacks
from streamfx.argument_checks import check_call, require
from streamfx.cost.inductor_choice import compiles_graph
from streamfx.distributed.rank_consensus import Exchange, run_with_consensus
from streamfx.distributed.zero_3 import refuse_partitioned
from streamfx.errors import IntegrationError, NotStreamedError, OptionError, OverBudgetError, RanksDifferError, describe_error
from streamfx.fallbacks import strict_error, try_step, warn_if_partly_on_meta
from streamfx.frontend.associative_scan_match import replace_scan_trees
from streamfx.frontend.capture import initial_facts
from streamfx.frontend.gc_pause import pause_gc
from streamfx.frontend.mask_buffers import MaskGuard, WatchedInput, patterns_of, watched_inputs
from streamfx.frontend.quick_bound import find_fitting_lengths
from streamfx.frontend.split_graphs import TwoSequencesError
from streamfx.frontend.ssd_matmul import replace_ssd_products
from streamfx.frontend.stack_room import call_with_room
from streamfx.frontend.unchunked_choice import ChunkableCompilation, FitsUnchunkedError
from streamfx.frontend.weight_ids import weight_ids
from streamfx.ir.facts import Facts
from streamfx.ir.joint import graph_copy, outputs_of
from streamfx.ir.piecewise import Pieces
from streamfx.lazy import Deferral, defer_outputs
from streamfx.lazy.outputs import DeferredCall
from streamfx.lazy.uses import Uses
from streamfx.log import log
from streamfx.options import Options, check_mode, environment_options, resolve_options
from streamfx.passes import run_pipeline
from streamfx.passes.lowering.gradient_release import plan_chain, run_in_segments
from streamfx.passes.ops.collectives import has_collectives, has_unused_waits
from streamfx.passes.ops.rules import DECOMPOSITIONS
from streamfx.passes.partition.unchunked import GraphPair, may_fit_unchunked, may_run_unchunked
from streamfx.progress import show_activity
from streamfx.rank_errors import failed_here
from streamfx.runtime.inductor_errors import NOT_COMPILED, blame
from streamfx.runtime.outer import HostProgramRunner
from streamfx.runtime.stagewise import GradientReleaseChain, StagewiseFunction
from streamfx.tools.report.fallback_reasons import check_budget
from streamfx.tools.report.notices import note, priced, warn_about_lost_writes, warn_if_no_gain, warn_if_torch_untested
from streamfx.tools.report.printer import show_product
from streamfx.torch_private import (
    aot_autograd,
    default_partition,
    dynamo_input_indices,
    is_held_by_model,
    keep_saved_tensors,
    min_cut_rematerialization_partition,
    mutated_inputs,
    no_function_modes,
    reset_tracing_on_error,
    static_inputs,
)
from streamfx.torch_private.autograd import inputs_in_results, inputs_with_gradients
from streamfx.torch_private.dynamo import register_backend_names, unwrap_errors
from streamfx.torch_private.inductor import InductorFailedError, compile_dynamo_graph
from streamfx.torch_private.symbolic_sizes import pair_dimensions, tracing_modes

COMPILE = 'it is a backend: write torch.compile(model, backend="streambp"), or streamfx.enable(model)'


@check_call(IntegrationError, "streamfx.streambp(...)", do=COMPILE)
def streambp(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph into a callable with the same results. `torch.compile` calls this function.

    Args:
        module: the graph that Dynamo has traced.
        example_inputs: its inputs, as fake tensors.
        options: a dictionary of options, or `streamfx.Options`.
        mode: None or "default": modes are settings of Inductor.

    Returns:
        A function of the same inputs, whose gradients are computed in chunks of the sequence.

    Raises:
        OptionError: an unknown option, an invalid value, or a mode.
        IntegrationError: `module` is not a graph.
        NotStreamedError, OverBudgetError: `strict=True` or `memory_budget` cannot be satisfied.

    Example:
        >>> import torch
        >>> torch.compile(torch.nn.Linear(8, 8), backend="streambp")(torch.randn(1, 64, 8)).square().mean().backward()
    """
    requirement = "streamfx.streambp(...) takes a graph that Dynamo has traced"
    require(isinstance(module, fx.GraphModule), IntegrationError, requirement, module, COMPILE)
    with unwrap_errors(module.graph):
        check_mode(mode)
        warn_if_torch_untested()
        warn_about_lost_writes(module.graph)
        compilation, start = Compilation(module, resolve_options(options)), time.perf_counter()
        with show_activity("tracing", compilation.options.progress):
            run = call_with_room(compilation.compile, example_inputs)
        note(compilation.facts, time.perf_counter() - start, unchunked=compilation.is_trained_unchunked)
        return run


environment_options()  # report a bad variable when the backend is imported, not at the first call of a model
register_backend_names(("streambp", "streamfx"), f"{__name__}:streambp")  # for installations without an entry point


@dataclass
class Compilation(ChunkableCompilation):
    """Compiles one Dynamo graph through AOTAutograd; `facts` are the results of the passes, for reports."""

    module: fx.GraphModule
    options: Options
    facts: list[Facts] = field(default_factory=list)
    num_inputs: int = 0
    num_outputs: int = 0
    watched: list[WatchedInput] = field(default_factory=list)  # masks and tables whose values the plan relies on
    reads_inputs: bool = True  # whether to look for such masks and tables among the inputs
    rewritten: fx.GraphModule = field(init=False)  # `module` with scans and SSD products as operators
    deferred: Deferral | None = None  # the graph without its deferred outputs
    parameters: Sequence[int] = ()  # indices of inputs that are weights, if Dynamo does not report them
    chain: GradientReleaseChain | None = None  # state for gradients that are released before the backward graph ends
    report_no_gain = staticmethod(warn_if_no_gain)
    exchange: Exchange | None = None  # with other ranks
    weights: Sequence[int] = ()  # identifiers of the weights, which distinguish two models
    unchunked_halves: GraphPair | None = None  # the graphs to run if the unchunked graph takes less memory than its loops
    is_trained_unchunked: bool = False  # Inductor compiled a training step unchunked, so there are no facts

    def __post_init__(self) -> None:
        self.rewritten = self.module

    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph: loops over chunks, Inductor's code if it fits the memory budget unchunked, or two graphs.

        With some inputs on the meta device, AOTAutograd cannot trace it: without `strict`, return the eager graph.
        """
        inputs = list(example_inputs)
        refuse_partitioned(inputs)
        if self.certainly_fits(inputs):
            self.is_trained_unchunked = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)
            return self._compile_unchunked(inputs)
        try:
            with pause_gc(), reset_tracing_on_error(), tracing_modes(inputs):
                return self._compile(inputs)
        except FitsUnchunkedError:
            return self._compile_unchunked(inputs)
        except TwoSequencesError as error:
            split_error = error.with_traceback(None)  # otherwise it keeps all values of the trace alive
        except RuntimeError as error:
            if self.options.strict or not warn_if_partly_on_meta(inputs, error):
                raise
            return self.module.forward
        return self.compile_in_parts_or_unchunked(inputs, split_error)

    def _compile_unchunked(self, inputs: list[Any]) -> Callable[..., Any]:
        """Return the graph compiled by Inductor, unchunked. If Inductor fails: raise under `strict`, else compile eager loops."""
        try:
            with show_activity("compiling", self.options.progress):
                return compile_dynamo_graph(self.module, inputs)
        except InductorFailedError as error:
            if self.options.strict:
                raise
            log.warning(NOT_COMPILED, blame(error), exc_info=log.isEnabledFor(logging.DEBUG))
            self.facts[:] = [facts for facts in self.facts if facts.fits != "compiled"]
            self.is_trained_unchunked = False
            self.options = replace(self.options, bodies="eager")
            return self.compile(inputs)

    def _compile(self, inputs: list[Any]) -> Callable[..., Any]:
        """Rewrite Dynamo's graph, and return it compiled by AOTAutograd with our partitioner, which runs the passes.

        The rewrite replaces scans and SSD products by operators, and removes deferred outputs. The result is wrapped to
        release gradients early, to return deferred outputs, and to check the inputs whose values the plan relies on. Raises
        `FitsUnchunkedError` or `TwoSequencesError` if the graph should run unchunked, or as two graphs.
        """
        self.unchunked_halves = None
        if self.reads_inputs:
            model_owned = [is_held_by_model(node) for node in self.module.graph.find_nodes(op="placeholder")]
            self.watched = watched_inputs(inputs, model_owned)
        self.num_inputs, self.weights, self.on_one_rank = len(inputs), weight_ids(inputs), self.is_on_one_rank(inputs)
        compiler = aot_autograd(
            fw_compiler=self.run_forward,
            bw_compiler=self.run,
            inference_compiler=no_function_modes()(self.run_inference),
            partition_fn=no_function_modes()(self.partition_stagewise),
            decompositions=DECOMPOSITIONS,
        )
        strict = self.options.strict
        self.rewritten = try_step(lambda: replace_scan_trees(self.module), self.module, fallbacks.SCANS_NOT_MATCHED, strict)
        self.rewritten = try_step(lambda: replace_ssd_products(self.rewritten), self.rewritten, fallbacks.SSD_NOT_MATCHED, strict)
        deferral = self.deferred = self.deferral() if self.on_one_rank else None
        self.chain = GradientReleaseChain(self.options.gradients == "stagewise") if self.options.gradients != "at once" else None
        compiled = compiler(self.rewritten if deferral is None else deferral.module, inputs)
        compiled = StagewiseFunction(compiled, self.chain) if self.chain is not None and self.chain.released else compiled
        if deferral is not None:
            compiled = DeferredCall(compiled, deferral.plan, Uses(self.options, compiled_use), deferral.unread)
        watched = [watched_input for watched_input in self.watched if watched_input.fingerprint is not None]
        return MaskGuard(compiled, watched, self.without_mask_patterns()) if watched else compiled

    def certainly_fits(self, inputs: list[Any]) -> bool:
        """Return whether a bound proves, without a trace, that the graph fits the budget, so that Inductor compiles it.

        If sizes are dynamic, Dynamo guards get the longest lengths of the proof: a longer call is compiled again.
        """
        budget = self.options.memory_budget if self.options.chunk_size == "auto" else None
        if budget is None or not self.is_on_one_rank(inputs) or not compiles_graph(self.options, inputs):
            return False
        find_lengths = partial(find_fitting_lengths, self.module.graph, inputs, budget)
        longest_lengths = try_step(find_lengths, None, fallbacks.NOT_BOUNDED, strict=False)
        if longest_lengths:
            longest_lengths.guard(self.module.graph)
        return longest_lengths is not None

    def part_of(self, module: fx.GraphModule) -> Compilation:
        """Return a compilation of one part of this graph, with its own facts."""
        return Compilation(module, self.options, exchange=self.exchange)

    def deferral(self) -> Deferral | None:
        """Return the graph without its outputs that are large and cheap to recompute; None if it has none, or none are lazy."""
        if self.options.outputs == "dense":
            return None
        deferral = try_step(lambda: defer_outputs(self.rewritten), None, fallbacks.NOT_DEFERRED, self.options.strict)
        if deferral is not None:
            log.debug("%s", deferral.plan)
        return deferral

    def without_mask_patterns(self) -> Callable[..., Any]:
        """Return the graph compiled without assumptions about the values of its inputs; it is compiled at its first call."""

        def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return Compilation(module, self.options, self.facts, reads_inputs=False).compile(example_inputs)

        return torch.compile(self.module.forward, backend=backend)

    def patterns(self, graph: fx.Graph, num_primals: int) -> dict[int, Pieces]:
        """Return the known values (`Pieces`) of inputs that hold a mask or table, by index among the traced graph's inputs.

        The compiled graph relies on them, and a `MaskGuard` checks them at each call.
        """
        return patterns_of(self.watched, self.num_inputs, dynamo_input_indices(graph, num_primals))

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run the passes, and return the forward and backward graphs to run. AOTAutograd calls this as its partitioner.

        They are host programs; or AOTAutograd's own partition, if the graph is a nested region's body, fits the memory budget
        without chunks, takes less memory without them, or has no program.
        """

        def partitioned(partitioner: Callable[..., Any], graph: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            return partitioner(graph, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)

        def unchunked() -> tuple[fx.GraphModule, fx.GraphModule]:
            """Return AOTAutograd's own forward and backward graphs."""
            return partitioned(min_cut_rematerialization_partition if has_unused_waits(joint.graph) else default_partition, joint)

        def partition_copy(partitioner: Callable[..., Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
            """Return the graphs of another partitioner, to compare their memory; `joint` stays unchanged."""
            return partitioned(partitioner, fx.GraphModule(joint, graph_copy(joint.graph)))

        if not isinstance(joint_inputs, tuple):  # the body of a nested region, which is not rewritten; else (primals, tangents)
            return unchunked()
        self.num_outputs = num_fwd_outputs
        pair_dimensions(joint.graph)
        num_primals = len(joint_inputs[0])
        static = others.get("static_lifetime_input_indices") or ()
        patterns = self.patterns(joint.graph, num_primals)
        capture = partial(initial_facts, joint, num_primals, num_fwd_outputs, static, patterns, mutated_inputs(joint.graph))
        self.check_part(capture().joint if self.is_part else None)
        is_on_one_rank = not has_collectives(joint.graph)  # otherwise another rank could choose differently
        budget = self.options.memory_budget if self.options.chunk_size == "auto" and is_on_one_rank else None
        if budget is not None and may_fit_unchunked((unchunked_facts := capture()).joint, budget):
            halves = unchunked()
            if self.check_fits_unchunked(unchunked_facts, *halves):
                return halves
        facts = self.analyze(
            capture, [partial(partition_copy, p) for p in (default_partition, min_cut_rematerialization_partition)]
        )
        if self.unchunked_halves is not None and self.unchunked_halves[1] is not None:
            return self.unchunked_halves[0], self.unchunked_halves[1]
        if facts.program is None or facts.program.backward is None:  # on the meta device no gradient is requested
            return unchunked()
        return facts.program.forward, facts.program.backward

    def partition_stagewise(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition; if gradients are released early (`self.chain`), also plan the segments of backward and their gradients."""
        forward, backward = self.partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if self.chain is not None and isinstance(joint_inputs, tuple):
            plan_chain(self.chain, joint.graph, forward.graph, backward, num_fwd_outputs, self.num_inputs)
        return forward, backward

    def analyze(self, capture: Callable[[], Facts], unchunked_builders: Sequence[Callable[[], GraphPair]]) -> Facts:
        """Run all passes, agree with other ranks, choose loops or an unchunked graph, and record and return the facts.

        `capture` returns the initial facts; `unchunked_builders` build the unchunked forward and backward graphs. If the returned
        facts have no program, the graph is not chunked. An internal error also has this result, unless `strict` is set or other
        ranks take part: then it is raised.
        """
        self.unchunked_builders = unchunked_builders
        try:
            with show_activity("planning", self.options.progress):
                facts = run_with_consensus(self.run_passes, capture, self.exchange, f"{self.options.ordering()} {self.weights}")
            self.check_strict(facts)
        except OverBudgetError as error:
            raise self.mention_untried_split(error, capture) from None
        except (OptionError, NotStreamedError, RanksDifferError):
            raise
        except Exception as error:
            if self.options.strict:
                raise strict_error(describe_error(error)) from error
            if has_collectives(capture().joint.graph):
                raise failed_here(error) from error
            log.warning(fallbacks.INTERNAL, describe_error(error), exc_info=log.isEnabledFor(logging.DEBUG))
            facts = replace(capture(), analysis_error=f"{type(error).__name__}: {error}")
        check_budget(facts, self.options)
        chunked_facts = facts
        if may_run_unchunked(facts, self.options):
            facts = try_step(partial(self.choose_smaller, facts, capture()), facts, fallbacks.NOT_COMPARED, strict=False)
        self.raise_if_splittable(chunked_facts)
        self.record_facts(facts)
        if facts.fits == "compiled":
            self.raise_fits_unchunked()
        return facts

    def run_passes(self, capture: Callable[[], Facts]) -> Facts:
        """Run the passes on the initial facts. An error of `strict=True` is raised here, so that other ranks learn of it."""
        facts = run_pipeline(capture, self.options, show_product)
        self.check_strict(facts)
        return facts

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a callable that runs the forward graph; AOTAutograd calls this as its forward compiler."""
        keep_saved_tensors()
        if self.chain is not None:
            self.chain.exclude_inputs(inputs_in_results())
        runner = HostProgramRunner(module, self.num_outputs, inputs_with_gradients(module.graph))
        runner.description = priced(self.facts[-1]) if self.facts else None
        return runner

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a callable that runs the backward graph, in segments if gradients are released early (`self.chain`).

        AOTAutograd calls this as its backward compiler.
        """
        runner = HostProgramRunner(module, is_backward=True)
        return runner if self.chain is None else run_in_segments(runner, self.chain)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a callable for a graph without gradients: forward loops that save nothing, or the graph if it has no program."""
        self.check_part()
        pair_dimensions(module.graph)
        patterns = self.patterns(module.graph, len(inputs))
        static = static_inputs() or self.parameters
        capture = partial(initial_facts, module, len(inputs), len(outputs_of(module.graph)), static, patterns)
        facts = self.analyze(capture, [lambda: (module, None)])
        return HostProgramRunner(facts.program.forward if facts.program is not None else module)


def compiled_use(
    graph: fx.GraphModule, inputs: list[Any], options: Options, weights: Sequence[int]
) -> tuple[Callable[..., Any], Facts | None]:
    """Compile a graph that computes results from deferred outputs; `weights` are the indices of inputs that are weights.

    Return the function, and its facts (None if Inductor compiled it unchunked).
    """
    compilation = Compilation(graph, options, parameters=weights)
    run = compilation.compile(inputs)
    return run, compilation.facts[-1] if compilation.facts else None
