"""`streamfx.explain`: report how the backend would compile a model, without running it (costs are found on fake tensors)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from streamfx.argument_checks import check_call, require
from streamfx.cost.call_order import bytes_of_parameters, curve_of_call, curve_of_calls, peak_of_calls
from streamfx.cost.categories import loss_values
from streamfx.cost.curve import Curve
from streamfx.cost.eager_step import eager_cost_of_graph
from streamfx.cost.flops import attention_flops, is_fused_attention
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, cost_of, streamed_share
from streamfx.cost.rates import rates_of
from streamfx.cost.released_gradients import ReleasedGradients
from streamfx.cost.work import total_work
from streamfx.errors import NotTracedError
from streamfx.frontend.unpicklable import Unpicklable
from streamfx.ir.joint import bound_arguments, is_parameter
from streamfx.ir.release_plan import released_indices
from streamfx.ir.span import Span
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.passes.lowering.gradient_release import release_segments
from streamfx.tools.inspect.at_peak import alive_at_peak
from streamfx.tools.inspect.input_checks import AS_TENSORS, DO, empty_inputs_text, numpy_inputs_text
from streamfx.tools.inspect.keywords import split_options
from streamfx.tools.inspect.program_texts import ProgramTexts
from streamfx.tools.inspect.side_effect_guard import original
from streamfx.tools.inspect.tracing import TracedCall, TracedGraph, traced
from streamfx.tools.report.communication import communication_of
from streamfx.tools.report.diagram import Diagram, diagram_of, flow_of
from streamfx.tools.report.exports import Exports
from streamfx.tools.report.fallback_reasons import strict_refusal_text
from streamfx.tools.report.notices import record_of
from streamfx.tools.report.page import Page, explanation_page
from streamfx.tools.report.stage_table import StageReport
from streamfx.tools.report.text import report_text
from streamfx.tools.report.timeline import Timeline, memory_timeline
from streamfx.tools.report.verdict import CHECKPOINTING, EAGER

OURS = "streamfx"
CLOCK = "predicted for {flops:,.0f} GFLOP/s, {bandwidth:,.0f} GB/s and {launch:.0f} us per operator"


@check_call(NotTracedError, "streamfx.explain(...)")
def explain(model: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Explanation:
    """Analyze the call `model(*args, **kwargs)` as `torch.compile(model, backend="streambp", options=options)` would.

    Nothing is computed and the model is not modified; model and arguments may be real, fake or on the meta device. `strict=True`
    raises nothing here: the report lists all that it would refuse.

    Args:
        model: a module, or a function of one.
        args, kwargs: the arguments of the call. A keyword named like an option (`chunk_size=512`) is an option, unless `forward`
            has an argument of that name.
        options: the backend's, as a dictionary or `streamfx.Options`; they may also be passed as keywords. Options that
            the model was compiled or enabled with are the defaults.

    Returns:
        The explanation. It prints as a report that starts with whether the backend pays off; `summary()` is a dictionary.

    Raises:
        NotTracedError: nothing of the call reaches the backend, the call computes nothing (an empty batch), or gets numpy arrays.
        IntegrationError: DeepSpeed's ZeRO-3 has partitioned the model.
        OptionError: an unknown option, or an invalid value.
        OverBudgetError: no plan fits `memory_budget`.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> found = streamfx.explain(lambda x: model(x).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
        >>> [stage.kind for stage in found.stages], found.summary()["graph_breaks"]
        (['streamed', 'streamed'], 0)
    """
    backend_options, kwargs = split_options(model, options, args, kwargs, "streamfx.explain(...)")
    model = original(model)
    arrays = numpy_inputs_text((args, kwargs))
    require(not arrays, NotTracedError, "streamfx.explain takes tensors", f"numpy arrays: {arrays}", AS_TENSORS)
    explanation = Explanation(traced(model, args, kwargs, backend_options))
    if (empty := empty_inputs_text((args, kwargs))) and not flops_of_calls(explanation.costs):
        raise NotTracedError(
            "streamfx.explain takes a call that computes something", found=f"{empty}, and no matrix products", do=DO
        )
    return explanation


class Explanation(Unpicklable, Exports, ProgramTexts):
    """The analysis of one call. Costs are predicted on first access.

    Args:
        call: the traced call; `streamfx.explain` creates it.
        updates: an optimizer in the backward pass takes and frees each parameter gradient as soon as it is complete.

    Example:
        >>> import torch, streamfx
        >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
        >>> print(found)  # doctest: +ELLIPSIS
        streamfx: ...
    """

    _keep = "keep summary(), which is a dictionary, or the page that to_html(path) writes"

    def __init__(self, call: TracedCall, updates: bool = False) -> None:
        self.call, self.updates = call, updates

    def __str__(self) -> str:
        return report_text(self.summary()) + strict_refusal_text([graph.facts for graph in self.call.graphs], self.call.options)

    __repr__ = __str__

    @cached_property
    def stages(self) -> list[StageReport]:
        """The stages of all graphs, in order."""
        costs = zip(self.call.graphs, self._costs_by_graph, strict=True)
        records = (record_of(graph.facts, number, cost) for number, (graph, cost) in enumerate(costs))
        return [stage for record in records for stage in record.stages]

    def summary(self, with_baseline: bool = True) -> dict[str, Any]:
        """Return all figures and findings as plain JSON types.

        Bytes are those of activations and gradients, without parameters and inputs, at the memory peak. The baseline is the same
        call in eager mode; the checkpointing figures are for eager mode with each layer checkpointed. They are None if that does
        not apply, and `not_checkpointed` gives the reason. `at_peak` lists the largest values between loops.

        `wire` is the data each rank sends to others, as calls and bytes, by forward or backward graph and by kind:
        `gathers`, `reductions`, `exchanges` (all-to-all, broadcast), and `in_loops` times the number of chunks; None if
        nothing is sent. Each stage has the same entry, and so has `eager` for the same call, with each layer
        checkpointed if there are layers. `early_reductions` is the fraction of the backward graph's reductions that
        start before its last loop; `whole_weights_bytes` are alive at the peak.

        Args:
            with_baseline: whether to trace eager mode and checkpointing, too. If not, their figures are zero.

        Returns:
            The report as a dictionary.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.summary()["sequence"], found.summary(with_baseline=False)["baseline_flops"]
            ([64], 0)
        """
        streamed, baseline = self.costs, self.baseline if with_baseline else Cost(0, 0, 0)
        eager = (self.call.checkpointed or self.call.eager) if with_baseline else None
        # All gradients are alive at the end, including gradients of code between graphs: `baseline.gradients`.
        return {
            "graphs": len(self.call.graphs),
            "graph_breaks": len(self.call.breaks),
            "break_reasons": [asdict(item) for item in self.call.breaks],
            "splits": [graph.facts.first_line for graph in self.call.graphs if graph.facts.first_line],
            "stopped": self.call.stopped or None,
            "sequence": [sequence_length(graph.facts) for graph in self.call.graphs],
            "stages": [report.as_dict() for report in self.stages],
            "streamed_flops_share": self._streamed_share(baseline),
            "peak_bytes": max(peak_of_calls(streamed, self._gradients), 0 if self.updates else baseline.gradients),
            "baseline_peak_bytes": baseline.peak,
            "checkpointing_peak_bytes": None if self.call.checkpointed is None else self.call.checkpointed.peak,
            "not_checkpointed": (self.call.not_checkpointed or None) if with_baseline else None,
            "trains": self.call.trains,
            "at_peak": alive_at_peak(self.call.graphs, self._costs_by_graph),
            "saved_bytes": sum(cost.held for cost in streamed),
            "baseline_saved_bytes": baseline.held,
            "flops": flops_of_calls(streamed),
            "baseline_flops": baseline.flops,
            "checkpointing_flops": None if self.call.checkpointed is None else self.visible(self.call.checkpointed).flops,
            "wire": communication_of(
                [graph.facts for graph in self.graph_calls], streamed, eager, self.call.checkpointed is not None
            ),
            "options": self.call.options.as_dict(),
        }

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes alive over the step by category, next to checkpointing and eager. Its peak is `peak_bytes` of the summary."""
        rates = rates_of(self._device)
        courses = [
            memory_timeline(way, curve, lambda work: rates.seconds(work.flops, work.moved, work.launches), flops)
            for way, (curve, flops) in self.curves().items()
        ]
        clock = CLOCK.format(flops=rates.flops / 1e9, bandwidth=rates.bandwidth / 1e9, launch=rates.launch * 1e6)
        return Timeline(tuple(courses), clock)

    def curves(self, with_baseline: bool = True) -> dict[str, tuple[Curve, int]]:
        """Return the memory curve and the FLOPs on visible pairs of each baseline, the backend first.

        Args:
            with_baseline: whether to include eager, and checkpointing if there are layers.

        Returns:
            For each baseline its curve and its FLOPs.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> list(found.curves())
            ['streamfx', 'eager']
        """
        at_end = self.baseline.gradients if with_baseline and not self.updates else 0
        curves_by_way = {OURS: (curve_of_calls(self.costs, self._gradients, at_end), flops_of_calls(self.costs))}
        baselines = {**self.baselines, EAGER: self.baseline} if with_baseline else {}
        return curves_by_way | {way: (curve_of_call(cost), cost.flops) for way, cost in baselines.items()}

    @property
    def page(self) -> Page:
        """The content of the HTML report."""
        return replace(explanation_page(self.call.name, self.summary(), self.timeline), code=self.stage_codes)

    @property
    def diagram(self) -> Diagram:
        """The stages, their loops, and the values passed between them."""
        return diagram_of(self.page.stages, [flow_of(graph.facts) for graph in self.call.graphs])

    @property
    def _device(self) -> torch.device:
        sources = (source.meta.get(VALUE) for graph in self.call.graphs for source in graph.facts.joint.sources)
        return next((value.device for value in sources if isinstance(value, torch.Tensor)), torch.device("cpu"))

    # -- costs per graph and per call

    @property
    def graph_calls(self) -> list[TracedGraph]:
        """The graph of each call in order (a graph may be called twice), or all graphs if calls were not recorded."""
        return self.call.calls or self.call.graphs

    @property
    def _gradients(self) -> list[int]:
        """Bytes of each call's parameter gradients that stay alive until the end of the step."""
        return [0 if self.updates else bytes_of_parameters(graph.facts.joint) for graph in self.graph_calls]

    def _costs_by_call(self, costs: list[Cost]) -> list[Cost]:
        """Return the cost of each graph call, given the cost of each distinct graph."""
        cost_of_graph = {id(graph): cost for graph, cost in zip(self.call.graphs, costs, strict=True)}
        return [cost_of_graph[id(graph)] for graph in self.graph_calls]

    @cached_property
    def _costs_by_graph(self) -> list[Cost]:
        """The cost of each distinct graph with the backend."""
        return [_cost_with_backend(graph, self.updates) for graph in self.call.graphs]

    @property
    def costs(self) -> list[Cost]:
        """The cost of each graph call with the backend."""
        return self._costs_by_call(self._costs_by_graph)

    def _streamed_share(self, baseline: Cost) -> float | None:
        """Return the fraction of the call's FLOPs that run in loops.

        Code that is not traced counts as not streamed, with its eager FLOPs; None if these are unknown.
        """
        costs, missing = self.costs, 0
        if self.call.in_part:
            if self.call.eager is None or not baseline.flops:
                return None
            missing = max(0, baseline.flops - self.visible(self._baseline_of_graphs()).flops)
        return streamed_share(costs, missing)

    @cached_property
    def baseline(self) -> Cost:
        """The cost of the call in eager mode; attention counts the pairs visible through its masks only."""
        cost = self.call.eager or self._baseline_of_graphs()
        return self.visible(cost)

    @property
    def baselines(self) -> dict[str, Cost]:
        """The cost of the call in eager mode with each layer checkpointed, by that baseline's name; empty without layers."""
        return {} if self.call.checkpointed is None else {CHECKPOINTING: self.visible(self.call.checkpointed)}

    def visible(self, cost: Cost) -> Cost:
        """Return the cost of a baseline without FLOPs on masked pairs.

        Args:
            cost: the cost of the baseline, with attention on all pairs.

        Returns:
            The cost with attention on the pairs that this call's masks leave visible.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.visible(found.baseline) == found.baseline  # nothing is masked
            True
        """
        work = cost.work
        if not work.masked_flops:
            return cost
        visible_flops, all_flops = (sum(counts) for counts in zip(*map(masked_attention_flops, self.graph_calls), strict=True))
        hidden_flops = work.masked_flops * (all_flops - visible_flops) // all_flops if all_flops else 0
        hidden_in_layers = cost.layer_attention * hidden_flops // work.attention_flops if hidden_flops else 0
        return replace(
            cost,
            work=work.without_hidden(hidden_flops),
            layer_flops=cost.layer_flops - hidden_in_layers,
            layer_attention=cost.layer_attention - hidden_in_layers,
        )

    def _baseline_of_graphs(self) -> Cost:
        """Return the eager cost of the traced graphs, without code between them."""
        costs = self._costs_by_call([_cost_without_backend(graph) for graph in self.call.graphs])
        gradients = [bytes_of_parameters(graph.facts.joint) for graph in self.graph_calls]
        peak, curve = peak_of_calls(costs, gradients), curve_of_calls(costs, gradients)
        return Cost(peak, peak, sum(cost.held for cost in costs), total_work(cost.work for cost in costs), forward_curve=curve)


def _cost_with_backend(graph: TracedGraph, updates: bool) -> Cost:
    """Return the cost of a graph with the backend; with `updates`, an optimizer frees each gradient once it is complete."""
    forward, backward = graph.that_run
    released = released_to_optimizer(graph, backward) if updates and backward is not None else None
    return cost_of(forward, backward, graph.num_outputs, loss_values(graph.facts), released, recorded=True)


def released_to_optimizer(graph: TracedGraph, backward: fx.GraphModule) -> ReleasedGradients | None:
    """Return the parameter gradients that an optimizer gets during the backward pass; None if it gets all at its end.

    The backward graph runs in segments; `chain.released` has the results (by index) that are released after each. Results in
    `chain.unchained` are not released.
    """
    chain = graph.chain
    if chain is None or not chain.released:
        return None
    segments = release_segments(backward, chain.saved)
    if released_indices(segments) != chain.released:
        return None
    unchained_segments = (i for i, results in enumerate(chain.released) if not chain.unchained.isdisjoint(results))
    parameter_results = {i for i, primal, _ in graph.facts.joint.trained if is_parameter(primal)} - chain.unchained
    primal_of_result = {i: source.primal_index for i, source in chain.sources.items() if i in parameter_results}
    return ReleasedGradients(segments, max(unchained_segments, default=0), primal_of_result)


def _cost_without_backend(graph: TracedGraph) -> Cost:
    """Return the cost of a graph in eager mode; if it cannot run on fake tensors there, that of AOTAutograd's partition."""
    try:
        return eager_cost_of_graph(graph.module)
    except Exception as error:
        log.info("the eager baseline is AOTAutograd's partition: %s", error)
        return cost_of(*graph.halves, graph.num_outputs, recorded=True)


def masked_attention_flops(graph: TracedGraph) -> tuple[int, int]:
    """Return the FLOPs of fused attention without a causal flag: on the pairs that masks leave visible, and on all pairs."""

    def flops(node: fx.Node, span: Span) -> int:
        """Return the FLOPs of a node on the key positions in `span`."""
        arguments = bound_arguments(node)
        values = {name: arguments[name].meta[VALUE] for name in ("query", "key", "value")}
        return attention_flops(node.target, values, span)

    spans = {} if graph.facts.found_key_spans is None else {node.name: span for node, span in graph.facts.key_spans.spans.items()}
    modules = [module for module in graph.halves if module is not None]
    nodes = [node for module in modules for node in module.graph.nodes if is_fused_attention(node.target)]
    masked = [node for node in nodes if not bound_arguments(node)["is_causal"]]
    return sum(flops(node, spans.get(node.name, Span())) for node in masked), sum(flops(node, Span()) for node in masked)


def flops_of_calls(costs: list[Cost]) -> int:
    """Return the sum of the FLOPs of all calls."""
    return sum(cost.flops for cost in costs)
