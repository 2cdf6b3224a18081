"""`streamfx.explain`: what the backend would make of a model, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from torch import fx

from streamfx.ir.facts import Facts, Span
from streamfx.ir.joint import bound_arguments
from streamfx.ir.sizes import Size, shape_of
from streamfx.options import Options
from streamfx.passes import pipeline
from streamfx.report.flops import attention_flops, is_fused_attention
from streamfx.report.memory import Cost, cost_of
from streamfx.report.stages import StageReport, stage_reports
from streamfx.report.text import report_text
from streamfx.report.tracing import TracedCall, TracedGraph, traced
from streamfx.torch_private import size_hint


def explain(model: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Explanation:
    """Analyse the call `model(*args, **kwargs)` as `torch.compile(model, backend="streambp", options=options)` would.

    Nothing is computed and the model stays as it is; model and arguments may be real, fake or on the meta device. The result
    prints as a report, and its `summary()` is a dictionary.
    """
    return Explanation(traced(model, args, kwargs, options))


class Explanation:
    """What was found in one call; costs are predicted when they are first asked for."""

    def __init__(self, call: TracedCall) -> None:
        self.call = call

    def __str__(self) -> str:
        return report_text(self.summary())

    __repr__ = __str__

    @cached_property
    def stages(self) -> list[StageReport]:
        """The stages of all graphs, in order."""
        return [
            report
            for number, graph in enumerate(self.call.graphs)
            for report in stage_reports(graph.facts, number, self._streamed[number].loops)
        ]

    def summary(self) -> dict[str, Any]:
        """All figures and findings, in values that JSON knows.

        Bytes are those of activations and gradients, beyond parameters and inputs, at the moment when most are alive. The
        baseline is the same graph without the backend: it keeps what the backward half reads.
        """
        streamed, baseline = self._of_calls(self._streamed), self._of_calls(self._baseline)
        return {
            "graphs": len(self.call.graphs),
            "graph_breaks": len(self.call.breaks),
            "break_reasons": [{"reason": item.reason, "where": item.where} for item in self.call.breaks],
            "stopped": self.call.stopped or None,
            "sequence": [sequence_length(graph.facts) for graph in self.call.graphs],
            "stages": [report.as_dict() for report in self.stages],
            "streamed_flops_share": _share(sum(cost.streamed_flops for cost in streamed), flops_of_calls(streamed)),
            "peak_bytes": peak_of_calls(streamed),
            "baseline_peak_bytes": peak_of_calls(baseline),
            "checkpointing_peak_bytes": peak_of_calls(self._of_calls(self._checkpointed)),
            "saved_bytes": sum(cost.held for cost in streamed),
            "baseline_saved_bytes": sum(cost.held for cost in baseline),
            "flops": flops_of_calls(streamed),
            "baseline_flops": flops_of_calls(baseline) - sum(hidden_flops(graph) for graph in self._called),
            "options": self.call.options.as_dict(),
        }

    # -- costs by graph, and by call

    @property
    def _called(self) -> list[TracedGraph]:
        return self.call.calls or self.call.graphs

    def _of_calls(self, costs: list[Cost]) -> list[Cost]:
        """The cost of each call, given that of each graph."""
        of_graph = {id(graph): cost for graph, cost in zip(self.call.graphs, costs, strict=True)}
        return [of_graph[id(graph)] for graph in self._called]

    @cached_property
    def _streamed(self) -> list[Cost]:
        return [_cost_with_backend(graph, graph.facts) for graph in self.call.graphs]

    @cached_property
    def _baseline(self) -> list[Cost]:
        return [cost_of(graph.forward, graph.backward, graph.num_outputs) for graph in self.call.graphs]

    @cached_property
    def _checkpointed(self) -> list[Cost]:
        """Each stage kept by its inputs only and computed again in whole: what gradient checkpointing by layers does."""
        return [_cost_with_backend(graph, in_one_chunk(graph.facts, self.call.options)) for graph in self.call.graphs]


def _cost_with_backend(graph: TracedGraph, facts: Facts) -> Cost:
    if facts.program is None:
        return cost_of(graph.forward, graph.backward, graph.num_outputs)
    return cost_of(facts.program.forward, facts.program.backward, graph.num_outputs)


def in_one_chunk(facts: Facts, options: Options) -> Facts:
    """The same stages, each run in a single chunk."""
    length = sequence_length(facts)
    if facts.program is None or length is None:
        return facts
    steps = pipeline(Options(**{**options.as_dict(), "chunk_size": length, "loss_chunk_size": length}))
    names = [step.name for step in steps]
    for step in steps[names.index("plan") :]:
        facts = step.apply(facts)
    return facts


def sequence_length(facts: Facts) -> int | None:
    """Rows of the sequence in this call."""
    if facts.axes is None or facts.axes.sequence is None:
        return None
    length = facts.axes.sequence.length
    return length if isinstance(length, int) else _hint(length, facts)


def _hint(size: Size, facts: Facts) -> int | None:
    """What a symbolic size stood for, found in the shape of some input that has it."""
    for node in facts.joint.inputs:
        value = node.meta.get("val")
        shape = getattr(value, "shape", ())
        for dimension, known in zip(shape, shape_of(value) if shape else (), strict=True):
            if known == size:
                return size_hint(dimension)
    return None


def hidden_flops(graph: TracedGraph) -> int:
    """FLOPs that the baseline's fused attention is charged for keys that its mask hides from every row."""
    spans = {} if graph.facts.causality is None else {node.name: span for node, span in graph.facts.causality.spans.items()}
    nodes = _attention_nodes(module for module in (graph.forward, graph.backward) if module is not None)
    return sum(_charged(node) - _flops(node, spans[node.name]) for node in nodes if node.name in spans)


def _attention_nodes(modules: Iterable[fx.GraphModule]) -> list[fx.Node]:
    return [node for module in modules for node in module.graph.nodes if is_fused_attention(node.target)]


def _charged(node: fx.Node) -> int:
    return _flops(node, Span(high=0) if bound_arguments(node)["is_causal"] else Span())


def _flops(node: fx.Node, span: Span) -> int:
    arguments = bound_arguments(node)
    values = {name: arguments[name].meta["val"] for name in ("query", "key", "value")}
    return attention_flops(node.target, values, span)


def flops_of_calls(costs: list[Cost]) -> int:
    return sum(cost.flops for cost in costs)


def peak_of_calls(costs: list[Cost]) -> int:
    """Bytes at most when graphs run one after the other and back: what one leaves stays until its backward half has run."""
    peak = held = 0
    for cost in costs:
        peak = max(peak, held + cost.forward_peak)
        held += cost.held
    gradients = 0
    for cost in reversed(costs):
        held -= cost.held
        peak = max(peak, held + cost.backward_peak + gradients)
        gradients += cost.gradients
    return peak


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
