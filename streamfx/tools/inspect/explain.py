"""`streamfx.explain`: what the backend would make of a model, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from streamfx.argument_checks import refuse_unless, refusing
from streamfx.cost.call_order import bytes_of_parameters, peak_of_calls
from streamfx.cost.categories import loss_values
from streamfx.cost.curve import Curve
from streamfx.cost.eager_step import eager_cost_of_graph
from streamfx.cost.flops import attention_flops, is_fused_attention
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, cost_of, streamed_share
from streamfx.cost.rates import rates_of
from streamfx.cost.released_gradients import ReleasedGradients
from streamfx.cost.work import summed
from streamfx.errors import NotTracedError, ReportError
from streamfx.frontend.unpicklable import Unpicklable
from streamfx.ir.joint import bound_arguments, is_parameter
from streamfx.ir.release_plan import places_of
from streamfx.ir.span import Span
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.passes.lowering.gradient_release import deliveries
from streamfx.tools.inspect.at_peak import alive_at_peak
from streamfx.tools.inspect.comm_report import wire_of
from streamfx.tools.inspect.curves import curve_of_call, curve_of_calls
from streamfx.tools.inspect.explanation_page import page_of
from streamfx.tools.inspect.input_checks import AS_TENSORS, DO, arrays_among, empty_among
from streamfx.tools.inspect.keywords import options_among
from streamfx.tools.inspect.side_effect_guard import original
from streamfx.tools.inspect.tracing import TracedCall, TracedGraph, traced
from streamfx.tools.report.dataflow import flow_of
from streamfx.tools.report.diagram import Diagram, diagram_of
from streamfx.tools.report.exports import Exports
from streamfx.tools.report.fallback_reasons import told_of_strict
from streamfx.tools.report.loop_bodies import bodies_of, bodies_with, python_of
from streamfx.tools.report.notices import record_of
from streamfx.tools.report.page import Page
from streamfx.tools.report.stage_table import StageReport
from streamfx.tools.report.text import report_text
from streamfx.tools.report.timeline import Timeline, course_of
from streamfx.tools.report.verdict import CHECKPOINTING, EAGER

OURS = "streamfx"
CLOCK = "predicted for {flops:,.0f} GFLOP/s, {bandwidth:,.0f} GB/s and {launch:.0f} us per operator"


@refusing(NotTracedError, "streamfx.explain(...)")
def explain(model: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Explanation:
    """Analyse the call `model(*args, **kwargs)` as `torch.compile(model, backend="streambp", options=options)` would.

    Nothing is computed and the model stays as it is; model and arguments may be real, fake or on the meta device. `strict=True`
    raises nothing here: the report is what says all that it refuses, and ends with that.

    Args:
        model: a module, or a function of one.
        args, kwargs: what it is called with. A keyword that is called like an option (`chunk_size=512`) is one, unless `forward`
            names an argument so.
        options: the backend's, as a dictionary or `streamfx.Options`; they may also be given by their names. What a model was
            compiled or enabled with holds where they say nothing else.

    Returns:
        What was found: it prints as a report that begins with whether the backend pays, and `summary()` is a dictionary.

    Raises:
        NotTracedError: nothing of the call arrived at the backend, it computes nothing, as of an empty batch, or it is of arrays.
        IntegrationError: DeepSpeed's ZeRO-3 has partitioned the model.
        OptionError: an option that does not exist, or a value that it cannot have.
        OverBudgetError: no plan is within `memory_budget`.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> found = streamfx.explain(lambda x: model(x).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
        >>> [stage.kind for stage in found.stages], found.summary()["graph_breaks"]
        (['streamed', 'streamed'], 0)
    """
    given, kwargs = options_among(model, options, args, kwargs, "streamfx.explain(...)")
    model = original(model)
    arrays = arrays_among((args, kwargs))
    refuse_unless(not arrays, NotTracedError, "streamfx.explain asks for tensors", f"arrays of numpy: {arrays}", AS_TENSORS)
    found = Explanation(traced(model, args, kwargs, given))
    if (empty := empty_among((args, kwargs))) and not flops_of_calls(found.costs):
        raise NotTracedError("streamfx.explain asks for a call that computes something", found=f"{empty}, and no products", do=DO)
    return found


class Explanation(Unpicklable, Exports):
    """What was found in one call; costs are predicted when they are first asked for.

    Args:
        call: what tracing has found of the call; `streamfx.explain` makes it.
        updates: an optimizer in the backward pass takes gradients of parameters once they are complete, and frees them.

    Example:
        >>> import torch, streamfx
        >>> weight = torch.randn(8, 8, requires_grad=True)
        >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
        >>> print(found)  # doctest: +ELLIPSIS
        streamfx: ...
    """

    _keep = "keep summary(), which is a dictionary, or the page that to_html(path) writes"

    def __init__(self, call: TracedCall, updates: bool = False) -> None:
        self.call, self.updates = call, updates

    def __str__(self) -> str:
        return report_text(self.summary()) + told_of_strict([graph.facts for graph in self.call.graphs], self.call.options)

    __repr__ = __str__

    @cached_property
    def stages(self) -> list[StageReport]:
        """The stages of all graphs, in order."""
        costs = zip(self.call.graphs, self._streamed, strict=True)
        records = (record_of(graph.facts, number, cost) for number, (graph, cost) in enumerate(costs))
        return [stage for record in records for stage in record.stages]

    def summary(self, with_baseline: bool = True) -> dict[str, Any]:
        """All figures and findings, in values that JSON knows.

        Bytes are those of activations and gradients, beyond parameters and inputs, at the moment when most are alive. The
        baseline is the same call in eager; with checkpointing, in eager with each layer checkpointed (None where that is no other
        way: `not_checkpointed` says why). `at_peak` are the values between loops that take the most of it.
        `wire` is what each rank sends to others (None where it sends nothing), by half and kind as calls and bytes:
        `gathers`, `reductions`, `exchanges` (all to all, broadcast), and those `in_loops` times their chunks; the same of each
        stage, and of `eager` on the same call, with each layer checkpointed where there are layers. `early_reductions` is the
        share of reductions of the backward half that begin before its last loop, `whole_weights_bytes` are alive at the peak.

        Args:
            with_baseline: whether eager and checkpointing are followed, too; without, their figures are zero.

        Returns:
            The report as a dictionary.

        Example:
            >>> import torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.summary()["sequence"], found.summary(with_baseline=False)["baseline_flops"]
            ([64], 0)
        """
        streamed, baseline = self.costs, self.baseline if with_baseline else Cost(0, 0, 0)
        # at the end all gradients are there, those of what runs between graphs, too: `baseline.gradients`
        return {
            "graphs": len(self.call.graphs),
            "graph_breaks": len(self.call.breaks),
            "break_reasons": [asdict(item) for item in self.call.breaks],
            "splits": [graph.facts.begins for graph in self.call.graphs if graph.facts.begins],
            "stopped": self.call.stopped or None,
            "sequence": [sequence_length(graph.facts) for graph in self.call.graphs],
            "stages": [report.as_dict() for report in self.stages],
            "streamed_flops_share": self._streamed_share(baseline),
            "peak_bytes": max(peak_of_calls(streamed, self._gradients), 0 if self.updates else baseline.gradients),
            "baseline_peak_bytes": baseline.peak,
            "checkpointing_peak_bytes": None if self.call.checkpointed is None else self.call.checkpointed.peak,
            "not_checkpointed": (self.call.not_checkpointed or None) if with_baseline else None,
            "trains": self.call.trains,
            "at_peak": alive_at_peak(self.call.graphs, self._streamed),
            "saved_bytes": sum(cost.held for cost in streamed),
            "baseline_saved_bytes": baseline.held,
            "flops": flops_of_calls(streamed),
            "baseline_flops": baseline.flops,
            "checkpointing_flops": None if self.call.checkpointed is None else self.visible(self.call.checkpointed).flops,
            "wire": wire_of(self._called, streamed, self.call) if with_baseline else wire_of(self._called, streamed),
            "options": self.call.options.as_dict(),
        }

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes alive over the step, by term, beside checkpointing's and eager's; its peak is `peak_bytes` of the summary."""
        rates = rates_of(self._device)
        courses = [
            course_of(way, curve, lambda work: rates.seconds(work.flops, work.moved, work.launches), flops)
            for way, (curve, flops) in self.curves().items()
        ]
        return Timeline(
            tuple(courses), CLOCK.format(flops=rates.flops / 1e9, bandwidth=rates.bandwidth / 1e9, launch=rates.launch * 1e6)
        )

    def curves(self, with_baseline: bool = True) -> dict[str, tuple[Curve, int]]:
        """By way of running the call its bytes after each operator, and its FLOPs on visible pairs; ours first.

        Args:
            with_baseline: whether those of eager, and of checkpointing where there are layers, are found, too.

        Returns:
            For each way its curve and its FLOPs.

        Example:
            >>> import torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> list(found.curves())
            ['streamfx', 'eager']
        """
        at_end = self.baseline.gradients if with_baseline and not self.updates else 0
        found = {OURS: (curve_of_calls(self.costs, self._gradients, at_end), flops_of_calls(self.costs))}
        if with_baseline and self.call.checkpointed is not None:
            checkpointed = self.visible(self.call.checkpointed)
            found[CHECKPOINTING] = curve_of_call(checkpointed), checkpointed.flops
        if with_baseline:
            found[EAGER] = curve_of_call(self.baseline), self.baseline.flops
        return found

    @property
    def page(self) -> Page:
        """What the HTML report shows."""
        return page_of(self.call.name, self.summary(), self.timeline)

    @property
    def diagram(self) -> Diagram:
        """Stages, their loops, and what these hand to each other."""
        return diagram_of(self.page.stages, [flow_of(graph.facts) for graph in self.call.graphs])

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The bodies of all loops by name: what is computed for each chunk."""
        return bodies_of([graph.facts for graph in self.call.graphs])

    def print_readable(self, module: str | None = None, print_output: bool = True) -> str:
        """Print, and return, the bodies of the stages that hold a module (`"model.layers.1"`; all without one) as Python that
        runs: a class for each loop, whose `forward` computes a chunk.

        Args:
            module: the name of a module; None stands for the whole model.
            print_output: whether the text is printed as well.

        Returns:
            The text.

        Raises:
            ReportError: no such module streams; it says which names are near.

        Example:
            >>> import torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> "def forward(" in found.print_readable(print_output=False)
            True
        """
        asked, do = "print_readable takes the name of a module", "give it as a text, or None for all of the model"
        refuse_unless(module is None or isinstance(module, str), ReportError, asked, module, do)
        facts = [graph.facts for graph in self.call.graphs]
        text = python_of(bodies_of(facts) if module is None else bodies_with(module, facts))
        if print_output:
            print(text)
        return text

    @property
    def _device(self) -> torch.device:
        sources = (source.meta.get(VALUE) for graph in self.call.graphs for source in graph.facts.joint.sources)
        return next((value.device for value in sources if isinstance(value, torch.Tensor)), torch.device("cpu"))

    # -- costs by graph, and by call

    @property
    def _called(self) -> list[TracedGraph]:
        return self.call.calls or self.call.graphs

    @property
    def _gradients(self) -> list[int]:
        """Bytes of each call's gradients of parameters that stay until the step's end."""
        return [0 if self.updates else bytes_of_parameters(graph.facts.joint) for graph in self._called]

    def _of_calls(self, costs: list[Cost]) -> list[Cost]:
        """The cost of each call, given that of each graph."""
        of_graph = {id(graph): cost for graph, cost in zip(self.call.graphs, costs, strict=True)}
        return [of_graph[id(graph)] for graph in self._called]

    @cached_property
    def _streamed(self) -> list[Cost]:
        return [_cost_with_backend(graph, self.updates) for graph in self.call.graphs]

    @property
    def costs(self) -> list[Cost]:
        """What each call of a graph costs with the backend."""
        return self._of_calls(self._streamed)

    def _streamed_share(self, baseline: Cost) -> float | None:
        """Of the call's FLOPs those in loops. What is not traced is none of ours, and counts as much as in eager; None where
        nobody knows how much that is.
        """
        costs, missing = self.costs, 0
        if self.call.in_part:
            if self.call.eager is None or not baseline.flops:
                return None
            missing = max(0, baseline.flops - self.visible(self._baseline_of_graphs()).flops)
        return streamed_share(costs, missing)

    @cached_property
    def baseline(self) -> Cost:
        """What the call costs in eager, with attention counted on the pairs that its masks leave visible."""
        cost = self.call.eager or self._baseline_of_graphs()
        return self.visible(cost)

    def visible(self, cost: Cost) -> Cost:
        """The cost of the call by another way, without FLOPs on pairs that masks hide.

        Args:
            cost: what the other way costs, with attention on all pairs.

        Returns:
            The cost with attention on the pairs that this call's masks leave visible.

        Example:
            >>> import torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.visible(found.baseline) == found.baseline  # nothing is masked
            True
        """
        work = cost.work
        if not work.masked_flops:
            return cost
        shown, charged = (sum(counts) for counts in zip(*map(masked_attention_flops, self._called), strict=True))
        hidden = work.masked_flops * (charged - shown) // charged if charged else 0
        in_layers = cost.layer_attention * hidden // work.attention_flops if hidden else 0
        return replace(
            cost,
            work=work.without_hidden(hidden),
            layer_flops=cost.layer_flops - in_layers,
            layer_attention=cost.layer_attention - in_layers,
        )

    def _baseline_of_graphs(self) -> Cost:
        costs = self._of_calls([_cost_without_backend(graph) for graph in self.call.graphs])
        gradients = [bytes_of_parameters(graph.facts.joint) for graph in self._called]
        peak, curve = peak_of_calls(costs, gradients), curve_of_calls(costs, gradients)
        return Cost(peak, peak, sum(cost.held for cost in costs), summed(cost.work for cost in costs), forward_curve=curve)


def _cost_with_backend(graph: TracedGraph, updates: bool) -> Cost:
    forward, backward = graph.that_run
    handed = taken_by_optimizer(graph, backward) if updates and backward is not None else None
    return cost_of(forward, backward, graph.num_outputs, loss_values(graph.facts), handed, recorded=True)


def taken_by_optimizer(graph: TracedGraph, backward: fx.GraphModule) -> ReleasedGradients | None:
    """Which gradients of parameters an optimizer gets before the end of the backward pass; None where it gets all then."""
    chain = graph.chain
    if chain is None or not chain.places:
        return None
    stretches = deliveries(backward, chain.saved)
    if places_of(stretches) != chain.places:
        return None
    late = (number for number, places in enumerate(chain.places) if not chain.kept_out.isdisjoint(places))
    parameters = {place for place, primal, _ in graph.facts.joint.trained if is_parameter(primal)} - chain.kept_out
    taken = {place: source.primal for place, source in chain.sources.items() if place in parameters}
    return ReleasedGradients(stretches, max(late, default=0), taken)


def _cost_without_backend(graph: TracedGraph) -> Cost:
    """In eager; as AOTAutograd would run it where the graph has something that only a tracer can run."""
    try:
        return eager_cost_of_graph(graph.module)
    except Exception as error:
        log.info("the eager baseline is taken from AOTAutograd's partition: %s", error)
        return cost_of(*graph.halves, graph.num_outputs, recorded=True)


def masked_attention_flops(graph: TracedGraph) -> tuple[int, int]:
    """FLOPs of a graph's fused attention without a causal flag: on the pairs that its masks leave visible, and on all."""
    spans = {} if graph.facts.found_causality is None else {node.name: span for node, span in graph.facts.causality.spans.items()}
    modules = [module for module in graph.halves if module is not None]
    nodes = [node for module in modules for node in module.graph.nodes if is_fused_attention(node.target)]
    masked = [node for node in nodes if not bound_arguments(node)["is_causal"]]
    return sum(_flops(node, spans.get(node.name, Span())) for node in masked), sum(_flops(node, Span()) for node in masked)


def _flops(node: fx.Node, span: Span) -> int:
    arguments = bound_arguments(node)
    values = {name: arguments[name].meta[VALUE] for name in ("query", "key", "value")}
    return attention_flops(node.target, values, span)


def flops_of_calls(costs: list[Cost]) -> int:
    return sum(cost.flops for cost in costs)
