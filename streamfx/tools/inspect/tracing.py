"""Trace a call of a model as `torch.compile` would, without side effects on the model.

The frame runs on fake tensors: Dynamo and AOTAutograd trace it, the passes analyze each graph, and the compiled graphs are
replaced by stubs that return tensors of the right shapes. Nothing is computed, and no gradient is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from streamfx.cost.memory import Cost, tensor_like
from streamfx.cost.repeats import Repeat
from streamfx.distributed.zero_3 import refuse_partitioned
from streamfx.errors import NotTracedError, OverBudgetError, describe_error, with_article
from streamfx.frontend.backend import Compilation
from streamfx.frontend.capture import initial_facts
from streamfx.frontend.split_graphs import SplittableCompilation, TwoSequencesError
from streamfx.ir.facts import Facts
from streamfx.ir.joint import graph_copy
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import Options, resolve_options
from streamfx.passes import run_analyses, run_pipeline
from streamfx.passes.partition.unchunked import GraphPair
from streamfx.runtime.stagewise import GradientReleaseChain
from streamfx.tools.inspect.eager import EagerCall, checkpointed, tracing_mode
from streamfx.tools.inspect.full_depth import LayerSubset, of_all_layers
from streamfx.tools.inspect.graph_breaks import GraphBreak, distinct_breaks
from streamfx.tools.inspect.input_checks import advice_on
from streamfx.tools.inspect.layer_segments import LayersDifferError
from streamfx.tools.inspect.layers import first_layers, layers_of
from streamfx.tools.inspect.repeated_analysis import facts_of_all_layers
from streamfx.tools.inspect.side_effect_guard import (
    FakeConverter,
    modules_of,
    original,
    parameters_of,
    serialized,
    without_side_effects,
)
from streamfx.tools.report.pass_texts import PassText, pass_texts
from streamfx.tools.report.printer import show_product
from streamfx.torch_private import default_partition, in_trace_context, mutated_inputs, real_values
from streamfx.torch_private.autograd import inputs_in_results
from streamfx.torch_private.dynamo import (
    SWITCH_ON,
    SWITCHED_OFF,
    is_switched_off,
    isolated_compilation,
    line_reading_data,
    quiet_tracer,
    record_graph_breaks,
    unwrap_errors,
    user_error_of,
)

DECIDED_BY_DATA = (
    "values of data decide at this line which code runs, and tracing has no data: decide with tensors (torch.where), or outside "
    "the model; for layers that are dropped at random, set layerdrop=0 or call model.eval()"
)
NO_LAYERS = "no list of layers was found in the model"
NOT_TRAINED = "this call trains nothing, so there is nothing to checkpoint"
NOT_CALLED = "the layers of the model are not called"
NOT_TRACED = "with checkpoints, the call cannot be traced without data"


@dataclass
class TracedGraph:
    """One graph from Dynamo (`module`), the results of the passes on it (`facts`), and AOTAutograd's default partition of it."""

    module: fx.GraphModule
    facts: Facts
    plain: Callable[[], GraphPair]  # creates `halves`, which are rarely needed and slow for deep models
    num_outputs: int
    chain: GradientReleaseChain | None = None  # gradients that can be released before the end of the backward pass
    pass_texts: Callable[[], dict[str, PassText]] = dict  # by pass, in order; empty if few layers were traced for all

    @cached_property
    def halves(self) -> GraphPair:
        """The forward and backward graph of AOTAutograd's default partition; None for the second if nothing is trained."""
        return self.plain()

    @property
    def that_run(self) -> GraphPair:
        """The forward and backward graph that run: with loops, or of the default partition if the graph is not chunked."""
        program = self.facts.program
        return self.halves if program is None else (program.forward, program.backward)


@dataclass
class TracedCall:
    """All graphs of one call; `calls` lists each graph once per call, in order. `name` is the name of the callable.

    `eager` is the cost without a compiler, None if that requires data, and `checkpointed` that with checkpointed layers; if None,
    `not_checkpointed` is the reason. `alike` is the layer repetition. `stopped` is why the call was not traced to its end.
    """

    options: Options
    graphs: list[TracedGraph] = field(default_factory=list)
    calls: list[TracedGraph] = field(default_factory=list)
    breaks: tuple[GraphBreak, ...] = ()
    eager: Cost | None = None
    checkpointed: Cost | None = None
    not_checkpointed: str = ""
    alike: Repeat | None = None
    stopped: str = ""
    name: str = ""

    @property
    def trains(self) -> bool:
        """Whether any value gets a gradient."""
        return any(graph.facts.joint.tangents for graph in self.graphs)

    @property
    def in_part(self) -> bool:
        """Whether part of the call was not traced."""
        return bool(self.stopped) or any(graph_break.given_up for graph_break in self.breaks)


@serialized
def traced(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Any = None,
    baselines: bool = True,
    may_trace_subset: bool = False,
) -> TracedCall:
    """Trace a call. `baselines`: also find its costs in eager mode. `may_trace_subset`: trace only kept layers if possible."""
    model = original(model)
    if not callable(model):
        raise _not_traced(f"{with_article(type(model).__name__)}, which cannot be called")
    if isinstance(model, type):  # torch.compile would modify the class permanently
        raise _not_traced(f"a class ({model.__name__}), not an instance", "pass a model: Model(...), not Model")
    refuse_partitioned(parameters_of(model).values())
    backend_options = resolve_options(options)
    with tracing_mode(model, args, kwargs) as faker, quiet_tracer():  # the baselines use the same fake mode
        eager = EagerCall(model, args, kwargs, faker)
        cost = eager.cost() if baselines else None
        eager_traced = not baselines or cost is not None
        subset = eager.find_layer_subset() if may_trace_subset and eager_traced else None
        call = _trace_subset(backend_options, model, args, kwargs, faker, subset)
        call = call or _trace(TracedCall(backend_options, name=_name_of(model)), model, args, kwargs, faker)
        if baselines:
            call.eager, call.alike = cost, None if cost is None else eager.repeat
            if not layers_of(model):
                call.not_checkpointed = NO_LAYERS
            elif not call.trains:
                call.not_checkpointed = NOT_TRAINED
            elif (checkpointed_cost := eager.cost(checkpointed)) is None:
                call.not_checkpointed = NOT_TRACED if eager.wrapped_calls else NOT_CALLED
            else:
                call.checkpointed = checkpointed_cost
    return call


def _trace_subset(
    options: Options,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    faker: FakeConverter,
    subset: LayerSubset | None,
) -> TracedCall | None:
    """Return the call, traced with the first few ("kept") layers in place of all; None if they do not represent all."""
    if subset is None:
        return None
    try:
        with first_layers(model, subset.repeat.kept):
            call = _trace(TracedCall(options, name=_name_of(model)), model, args, kwargs, faker, subset)
    except LayersDifferError as error:
        log.info("all layers are traced: %s", error)
        return None
    return call if len(call.graphs) == len(call.calls) == 1 and not call.breaks and not call.stopped else None


def _name_of(model: Callable[..., Any]) -> str:
    """Return the class of a module, or the name, file and line of a function: `step (train.py:12)`."""
    if (code := getattr(model, "__code__", None)) is None:
        return str(getattr(model, "__qualname__", type(model).__name__))
    return f"{code.co_name.replace('<lambda>', 'lambda')} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _trace(
    call: TracedCall,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    faker: FakeConverter,
    subset: LayerSubset | None = None,
) -> TracedCall:
    """Trace in the active fake mode; add the graphs to `call`, and return it. `subset`: kept layers to expand to all."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        with real_values(), unwrap_errors(module.graph):
            recording = _RecordingCompilation(module, call) if subset is None else _SubsetCompilation(module, call, subset)
            return recording.compile(inputs)

    with without_side_effects(model), record_graph_breaks() as breaks, isolated_compilation(backend) as keywords:
        faker.replace(modules_of(model), buffers=False)  # buffers stay real: the compiler reads masks from them
        args, kwargs = faker.inputs((tuple(args), dict(kwargs)))
        try:
            torch.compile(model, backend=backend, **keywords)(*args, **kwargs)
        except Exception as error:
            cause = user_error_of(error) or error
            if isinstance(cause, (OverBudgetError, LayersDifferError)):
                raise cause from None
            line = line_reading_data(error)
            call.stopped = f"{describe_error(cause)}{f' ({line})' if line else ''}"
            if not call.graphs:
                raise _not_traced(call.stopped, DECIDED_BY_DATA if line else advice_on((args, kwargs))) from error
    call.breaks = distinct_breaks(breaks)
    if not call.graphs and is_switched_off():
        raise _not_traced(SWITCHED_OFF, SWITCH_ON)
    if not call.graphs:
        breaks_text = "; ".join(f"{item.reason} ({item.where})" for item in call.breaks) or "no operator on tensors"
        raise _not_traced(breaks_text, "; ".join(dict.fromkeys(item.do for item in call.breaks if item.do)))
    return call


def _not_traced(reason: str, do: str = "") -> NotTracedError:
    """Return the error that explains why a call was not traced."""
    return NotTracedError(
        "explain and plan trace calls that torch.compile can trace",
        found=reason,
        do=do or "check that model(*args, **kwargs) runs with these arguments",
    )


class QuietCompilation(Compilation):
    """A compilation without notices: the caller reports the result."""

    @staticmethod
    def report_no_gain(facts: Facts, options: Options) -> None: ...


class _RecordingCompilation(QuietCompilation):
    """A compilation that records its result and runs nothing."""

    def __init__(self, module: fx.GraphModule, call: TracedCall) -> None:
        lenient = replace(call.options, strict=False)  # report fallbacks instead of raising
        super().__init__(module, lenient, exchange=lambda text, group, **how: [text])  # other ranks do not take part
        self.call = call
        self.pass_texts: Callable[[], dict[str, PassText]] = dict
        self.original = fx.GraphModule(module, graph_copy(module.graph))  # a copy before any rewrite

    def run_passes(self, capture: Callable[[], Facts]) -> Facts:
        """Run the passes, and keep a function that runs them again on a copy of the graph to print the result of each."""
        self.pass_texts = in_trace_context(lambda: pass_texts(partial(run_pipeline, capture, self.options)))
        return super().run_passes(capture)

    def certainly_fits(self, inputs: list[Any]) -> bool:
        """Always false: the quick bound would skip the analysis that the caller wants to see."""
        return False

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph, and record it with the facts of the passes and its forward and backward graphs."""
        count_before = len(self.facts)
        halves = super().partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if len(self.facts) > count_before:
            facts = self.facts[-1]
            default = in_trace_context(lambda: default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others))
            plain = (lambda: halves) if facts.program is None else default
            self.call.graphs.append(TracedGraph(self.original, facts, plain, num_fwd_outputs, self.chain, self.pass_texts))
        return halves

    def part_of(self, module: fx.GraphModule) -> Compilation:
        return _RecordingCompilation(module, replace(self.call, graphs=[]))  # all parts share the list of calls

    def replace_by(self, parts: Sequence[SplittableCompilation]) -> None:
        super().replace_by(parts)
        self.call.graphs += (graph for part in parts if isinstance(part, _RecordingCompilation) for graph in part.call.graphs)

    def raise_fits_unchunked(self) -> None:
        """Nothing is compiled."""

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        super().run_forward(module, inputs)
        return _GraphStub(module, self.call)

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _GraphStub(module, self.call)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Record the graph of a call without gradients, and return its stub."""
        super().run_inference(module, inputs)
        outputs = module.graph.output_node().args[0]
        num_outputs = len(outputs) if isinstance(outputs, (list, tuple)) else 1
        self.call.graphs.append(TracedGraph(self.original, self.facts[-1], lambda: (module, None), num_outputs))
        return _GraphStub(module, self.call)


class _SubsetCompilation(_RecordingCompilation):
    """A compilation of the kept layers that analyzes the graph of all layers."""

    def __init__(self, module: fx.GraphModule, call: TracedCall, subset: LayerSubset) -> None:
        super().__init__(module, call)
        self.subset = subset
        self.subset_facts: Facts | None = None

    def run_passes(self, capture: Callable[[], Facts]) -> Facts:
        """Run the passes on the graph of all layers; if the kept layers' analyses determine those of all, they are reused."""
        facts = self.subset_facts
        make_facts = None if facts is None else _fresh_facts(partial(facts_of_all_layers, facts, self.subset))
        return run_pipeline(capture, self.options, show_product, make_facts)

    def compile_in_parts_or_unchunked(self, inputs: list[Any], error: TwoSequencesError) -> Callable[..., Any]:
        raise LayersDifferError("a graph of two sequences")

    def partition_stagewise(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run the passes on the joint graph of all layers, and return the default partition of the kept layers' graph."""
        if not isinstance(joint_inputs, tuple):
            raise LayersDifferError("the body of a nested region")
        num_primals, static = len(joint_inputs[0]), others.pop("static_lifetime_input_indices", None) or ()
        saved_state = self.watched, self.num_inputs
        watched = {watched_input.index: watched_input for watched_input in self.watched}
        if len(watched) > sum(watched_input.fingerprint is None for watched_input in self.watched):
            raise LayersDifferError("inputs that hold data")
        known_facts = {i: (watched[i].pattern if i in watched else None, i in static) for i in range(num_primals)}
        capture_arguments = static, self.patterns(joint.graph, num_primals), mutated_inputs(joint.graph)
        try:
            facts = initial_facts(joint, num_primals, num_fwd_outputs, *capture_arguments)
            self.subset_facts = run_analyses(facts, self.options)
        except Exception as error:
            log.info("all layers are analyzed: %s", error)
            self.subset_facts = None
        full = of_all_layers(joint, num_primals, num_fwd_outputs, known_facts, self.subset)
        self.watched = [replace(watched[origin], index=i) for i, origin in enumerate(full.origins) if origin in watched]
        self.num_inputs = len(full.origins)
        super().partition_stagewise(
            full.module,
            ([None] * self.num_inputs, joint_inputs[1]),
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=[i for i, origin in enumerate(full.origins) if origin in static],
            **others,
        )
        self.watched, self.num_inputs = saved_state
        self.chain = None  # it refers to the gradients of all layers, but this call has only the kept ones
        return default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static, **others
        )

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if inputs_in_results() != []:
            raise LayersDifferError("inputs that are, or may be, results")
        return super().run_forward(module, inputs)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise LayersDifferError("nothing is trained")


def _fresh_facts(make: Callable[[], Facts]) -> Callable[[], Facts] | None:
    """Return `make`, called once already to see that it works (the first result is reused); None if it raises an error."""
    try:
        unused = [make()]
    except Exception as error:
        log.info("all layers are analyzed: %s", error)
        return None
    return lambda: unused.pop() if unused else make()


class _GraphStub:
    """Returns the outputs of a graph without running it."""

    def __init__(self, module: fx.GraphModule, call: TracedCall) -> None:
        self._outputs = module.graph.output_node().args[0]
        self._call, self._graph = call, call.graphs[-1]
        self._boxed_call = True  # an instance attribute, because torch._dynamo.disable does not copy class attributes

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Free the arguments, record the call, and return outputs of the right shapes."""
        arguments.clear()
        self._call.calls.append(self._graph)
        values = (output.meta[VALUE] if isinstance(output, fx.Node) else output for output in self._outputs)  # type: ignore[union-attr]
        return list(map(tensor_like, values))
