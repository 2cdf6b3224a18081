"""Traces a call of a model as `torch.compile` would, and leaves the model as it was.

The frame runs under fake tensors: Dynamo and AOTAutograd trace it, the passes analyse each graph, and what would then compute is
replaced by something that only returns tensors of the right shapes. Nothing is computed, and no gradient is made.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from streamfx.cost.memory import Cost, made_like
from streamfx.cost.repeats import Repeat
from streamfx.distributed.zero_3 import refuse_partitioned
from streamfx.errors import NotTracedError, OverBudgetError, one, told
from streamfx.frontend.backend import Compilation
from streamfx.frontend.capture import captured
from streamfx.frontend.split_graphs import SplittableCompilation, TwoSequencesError
from streamfx.ir.facts import Facts
from streamfx.ir.joint import graph_copy
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import Options, resolved
from streamfx.passes import run_analyses, run_pipeline
from streamfx.runtime.stagewise import GradientReleaseChain
from streamfx.tools.inspect.eager import EagerCall, accepting_real, checkpointed, faker_of
from streamfx.tools.inspect.full_depth import LayerSubset, of_all_layers
from streamfx.tools.inspect.input_checks import advice_on
from streamfx.tools.inspect.layer_segments import LayersDifferError
from streamfx.tools.inspect.layers import first_layers, layers_of
from streamfx.tools.inspect.lock import alone
from streamfx.tools.inspect.repeated_analysis import facts_of_all_layers
from streamfx.tools.inspect.side_effect_guard import FakeConverter, modules_of, original, parameters_of, untouched
from streamfx.tools.report.dump import show_product
from streamfx.tools.report.fallback_reasons import advice_on_break
from streamfx.torch_private import default_partition, mutated_inputs, real_values, while_traced
from streamfx.torch_private.autograd import inputs_in_results
from streamfx.torch_private.dynamo import (
    SWITCH_ON,
    SWITCHED_OFF,
    cause_of,
    cause_of_break,
    compiled_apart,
    decided_by_data,
    is_switched_off,
    noted_graph_breaks,
    quiet_tracer,
    raised_as_itself,
)

DATA_DECIDE = (
    "numbers of the data decide at this line what is run, and there are none: decide it with tensors (torch.where), or outside "
    "of the model; layers that are dropped at random are kept with layerdrop=0, or in model.eval()"
)
NO_LAYERS = "no list of layers was found in the model"
NOT_TRAINED = "nothing is trained in this call, so there is nothing to checkpoint"
NOT_CALLED = "the layers that were found in the model are not called"
NOT_FOLLOWED = "with checkpoints the call cannot be followed without data"
Halves = tuple[fx.GraphModule, fx.GraphModule | None]


@dataclass
class TracedGraph:
    """One graph: as Dynamo gave it, what the passes found in it, and the two halves that would run without them.

    `plain` makes these halves: few ask for them, and a deep model takes its time. `chain` says which gradients can be handed over
    before the end.
    """

    module: fx.GraphModule
    facts: Facts
    plain: Callable[[], Halves]
    num_outputs: int
    chain: GradientReleaseChain | None = None

    @cached_property
    def halves(self) -> Halves:
        """The forward half and the backward half, if there is one."""
        return self.plain()

    @property
    def that_run(self) -> Halves:
        """The halves of its program; those of the graph as it stands where it has none."""
        program = self.facts.program
        return self.halves if program is None else (program.forward, program.backward)


@dataclass(frozen=True)
class GraphBreak:
    """A place at which Dynamo could not go on tracing; `given_up` says that the rest of the function runs in eager."""

    reason: str
    where: str
    do: str = ""
    given_up: bool = False


@dataclass
class TracedCall:
    """All graphs of one call; `calls` has a graph as often as it is called, in order.

    `eager` is what the call costs without any compiler, None if that cannot be told without data; `checkpointed` the same with
    every layer checkpointed; where it is None, `not_checkpointed` says why that is no other way of running it. `alike` says which
    layers stand for all there, if any. `stopped` says why the call could not be followed to its end, if it could not. `name` is
    that of what is called.
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
        """Whether anything of it gets a gradient."""
        return any(graph.facts.joint.tangents for graph in self.graphs)

    @property
    def in_part(self) -> bool:
        """Whether some of it was not traced."""
        return bool(self.stopped) or any(item.given_up for item in self.breaks)


@alone
def traced(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Any = None,
    baselines: bool = True,
    of_few: bool = False,
) -> TracedCall:
    """Trace one call of a model: real, fake or on the meta device, and so its arguments; also in eager if `baselines`.

    Where few layers are proven to stand for all, `of_few` traces these alone.
    """
    model = original(model)
    if not callable(model):
        raise _not_traced(f"{one(type(model).__name__)}, which cannot be called")
    if isinstance(model, type):  # torch.compile would change the class for good
        raise _not_traced(f"a class ({model.__name__}), not an object of it", "make a model of it: pass Model(...), not Model")
    refuse_partitioned(parameters_of(model).values())
    mode, faker = faker_of(model, args, kwargs)
    chosen = resolved(options)
    with accepting_real(mode), mode, quiet_tracer():  # eager and checkpoints are followed in it, too
        eager = EagerCall(model, args, kwargs, faker)
        cost = eager.cost() if baselines else None
        followed = not baselines or cost is not None
        call = _trace_few(chosen, model, args, kwargs, faker, eager.few()) if of_few and followed else None
        call = call or _trace(TracedCall(chosen, name=_name_of(model)), model, args, kwargs, faker)
        if baselines:
            call.eager, call.alike = cost, None if cost is None else eager.alike
            _compare(call, model, eager)
    return call


def _compare(call: TracedCall, model: Callable[..., Any], eager: EagerCall) -> None:
    """Fill in the call with checkpoints, which are another way of running it where they keep something from being kept."""
    if not layers_of(model):
        call.not_checkpointed = NO_LAYERS
    elif not call.trains:
        call.not_checkpointed = NOT_TRAINED
    else:
        call.checkpointed = eager.cost(checkpointed)
        call.not_checkpointed = "" if call.checkpointed is not None else NOT_FOLLOWED if eager.reached else NOT_CALLED


def _trace_few(
    options: Options,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    faker: FakeConverter,
    few: LayerSubset | None,
) -> TracedCall | None:
    """A call of all layers, of which few are traced; None where these do not stand for all."""
    if few is None:
        return None
    try:
        with first_layers(model, few.repeat.kept):
            call = _trace(TracedCall(options, name=_name_of(model)), model, args, kwargs, faker, few)
    except LayersDifferError as error:
        log.info("all layers are traced: %s", error)
        return None
    return call if len(call.graphs) == len(call.calls) == 1 and not call.breaks and not call.stopped else None


def _name_of(model: Callable[..., Any]) -> str:
    """What people call it: a module by its class, a function by its name."""
    return str(getattr(model, "__qualname__", type(model).__name__))


def _trace(
    call: TracedCall,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    faker: FakeConverter,
    few: LayerSubset | None = None,
) -> TracedCall:
    """Fill in the graphs of a call, in the fake mode that is active; of all layers where `few` stand for them."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        with real_values(), raised_as_itself(module.graph):
            return (_Watched(module, call) if few is None else _SubsetCompilation(module, call, few)).compile(inputs)

    with untouched(model), noted_graph_breaks() as breaks, compiled_apart(backend) as keywords:
        faker.replace(modules_of(model), buffers=False)  # the compiler reads masks in buffers
        args, kwargs = faker.inputs((tuple(args), dict(kwargs)))
        try:
            torch.compile(model, backend=backend, **keywords)(*args, **kwargs)
        except Exception as error:
            cause = cause_of(error) or error
            if isinstance(cause, (OverBudgetError, LayersDifferError)):
                raise cause from None
            line = decided_by_data(error)
            call.stopped = f"{told(cause)}{f' ({line})' if line else ''}"
            if not call.graphs:
                raise _not_traced(call.stopped, DATA_DECIDE if line else advice_on((args, kwargs))) from error
    call.breaks = distinct_breaks(breaks)
    if not call.graphs and is_switched_off():
        raise _not_traced(SWITCHED_OFF, SWITCH_ON)
    if not call.graphs:
        found = "; ".join(f"{item.reason} ({item.where})" for item in call.breaks) or "no operator on tensors"
        raise _not_traced(found, "; ".join(dict.fromkeys(item.do for item in call.breaks if item.do)))
    return call


def _not_traced(found: str, do: str = "") -> NotTracedError:
    return NotTracedError(
        "explain and plan follow calls that torch.compile can trace",
        found=found,
        do=do or "check that model(*args, **kwargs) runs with these arguments",
    )


def distinct_breaks(found: Sequence[tuple[str, int, str]]) -> tuple[GraphBreak, ...]:
    """Each place once: a break inside of an inlined function is met again by the function around it."""
    breaks: dict[str, GraphBreak] = {}
    for file, line, text in found:
        where = f"{file}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
        reason, hint, given_up = cause_of_break(text)
        breaks.setdefault(where, GraphBreak(reason, where, advice_on_break(reason, hint), given_up))
    return tuple(breaks.values())


class QuietCompilation(Compilation):
    """A compilation for somebody who asks about it: what it finds is told by who was asked."""

    @staticmethod
    def tell(facts: Facts, options: Options) -> None: ...


class _Watched(QuietCompilation):
    """A compilation that keeps what it finds, and runs nothing."""

    def __init__(self, module: fx.GraphModule, call: TracedCall) -> None:
        told = replace(call.options, strict=False)  # who asks what runs whole is told, not refused
        super().__init__(module, told, exchange=lambda text, group, **how: [text])  # no other rank need look, too
        self.call = call
        self.seen = fx.GraphModule(module, graph_copy(module.graph))  # as it is before anything is rewritten

    def fits_by_far(self, inputs: list[Any]) -> bool:
        """Not asked: who looks at a step wants to see all of it."""
        return False

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        number = len(self.facts)
        halves = super().partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if len(self.facts) > number:
            facts = self.facts[-1]
            again = while_traced(lambda: default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others))
            plain = (lambda: halves) if facts.program is None else again
            self.call.graphs.append(TracedGraph(self.seen, facts, plain, num_fwd_outputs, self.chain))
        return halves

    def part_of(self, module: fx.GraphModule) -> Compilation:
        return _Watched(module, replace(self.call, graphs=[]))  # calls are noted in one list

    def take(self, parts: Sequence[SplittableCompilation]) -> None:
        super().take(parts)
        self.call.graphs += (graph for part in parts if isinstance(part, _Watched) for graph in part.call.graphs)

    def hand_over(self) -> None:
        """Nothing is compiled."""

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        super().run_forward(module, inputs)
        return _GraphStandIn(module, self.call)

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _GraphStandIn(module, self.call)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        super().run_inference(module, inputs)
        outputs = module.graph.output_node().args[0]
        count = len(outputs) if isinstance(outputs, (list, tuple)) else 1
        self.call.graphs.append(TracedGraph(self.seen, self.facts[-1], lambda: (module, None), count))
        return _GraphStandIn(module, self.call)


class _SubsetCompilation(_Watched):
    """A compilation of few layers that finds out about all."""

    def __init__(self, module: fx.GraphModule, call: TracedCall, few: LayerSubset) -> None:
        super().__init__(module, call)
        self.few = few
        self.found_of_few: Facts | None = None

    def found_by_passes(self, capture: Callable[[], Facts]) -> Facts:
        """Begins with what analyses have found of few layers, where that tells what they would find of all."""
        few = self.found_of_few
        known = None if few is None else _each_time(partial(facts_of_all_layers, few, self.few))
        return run_pipeline(capture, self.options, show_product, known)

    def in_parts_or_whole(self, inputs: list[Any], found: TwoSequencesError) -> Callable[..., Any]:
        raise LayersDifferError("a graph of two sequences")

    def analysed_few(self, capture: Callable[[], Facts]) -> Facts | None:
        """What analyses find in the graph of few layers; None where it has to be found in that of all."""
        try:
            return run_analyses(capture(), self.options)
        except Exception as error:
            log.info("all layers are analysed: %s", error)
            return None

    def partition_in_stretches(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The halves of few layers, once the passes have run on the joint graph of all."""
        if not isinstance(joint_inputs, tuple):
            raise LayersDifferError("the body of a nested region")
        count, static = len(joint_inputs[0]), others.pop("static_lifetime_input_indices", None) or ()
        before = self.watched, self.num_inputs
        known = {item.position: item for item in self.watched}
        if len(known) > sum(item.seen is None for item in self.watched):
            raise LayersDifferError("inputs that hold data")
        said = {
            position: (known[position].pattern if position in known else None, position in static) for position in range(count)
        }
        about = static, self.patterns(joint.graph, count), mutated_inputs(joint.graph)
        self.found_of_few = self.analysed_few(partial(captured, joint, count, num_fwd_outputs, *about))
        whole = of_all_layers(joint, count, num_fwd_outputs, said, self.few)
        self.watched = [replace(known[old], position=i) for i, old in enumerate(whole.origins) if old in known]
        self.num_inputs = len(whole.origins)
        super().partition_in_stretches(
            whole.module,
            ([None] * self.num_inputs, joint_inputs[1]),
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=[i for i, old in enumerate(whole.origins) if old in static],
            **others,
        )
        self.watched, self.num_inputs = before
        self.chain = None  # of all layers' gradients, of which this call has few
        return default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static, **others
        )

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if inputs_in_results() != []:
            raise LayersDifferError("inputs that are results, or it is not known whether there are any")
        return super().run_forward(module, inputs)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise LayersDifferError("nothing is trained")


def _each_time(make: Callable[[], Facts]) -> Callable[[], Facts] | None:
    """Facts that are made anew each time; None where they cannot be."""
    try:
        made = [make()]
    except Exception as error:
        log.info("all layers are analysed: %s", error)
        return None
    return lambda: made.pop() if made else make()


class _GraphStandIn:
    """Returns what a graph would return, without running it."""

    def __init__(self, module: fx.GraphModule, call: TracedCall) -> None:
        self._outputs = module.graph.output_node().args[0]
        self._call, self._graph = call, call.graphs[-1]
        self._boxed_call = True  # on the instance: torch._dynamo.disable copies no class attributes

    def __call__(self, arguments: list[Any]) -> list[Any]:
        arguments.clear()
        self._call.calls.append(self._graph)
        values = (item.meta[VALUE] if isinstance(item, fx.Node) else item for item in self._outputs)  # type: ignore[union-attr]
        return list(map(made_like, values))
