"""Predict one step of a model at one length: traced, planned and costed by the code that also compiles and runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from streamfx.cost.call_order import curve_of_call
from streamfx.cost.categories import INPUTS, OPTIMIZER, OTHER, PARAMETERS
from streamfx.cost.curve import Curve
from streamfx.cost.memory import Cost
from streamfx.cost.work import NO_WORK, Work, total_work
from streamfx.errors import PlanError
from streamfx.ir.facts import Facts
from streamfx.runtime.pinned import bytes_pinned
from streamfx.tools.inspect.eager import LayerWrapper, eager_cost
from streamfx.tools.inspect.explain import OURS, Explanation
from streamfx.tools.inspect.tracing import traced
from streamfx.tools.planner.frontier import FrontierPlan, frontier_of
from streamfx.tools.planner.host_weights import HostWeights
from streamfx.tools.planner.models import loss_of
from streamfx.tools.planner.overlap import OverlapInterval, bytes_on_host, generate_segments
from streamfx.tools.planner.shards import rank_bytes
from streamfx.tools.report.diagram import LoopTraffic, flow_of
from streamfx.tools.report.verdict import EAGER
from streamfx.torch_private.groups import has_ranks


@dataclass(frozen=True)
class StepPrediction:
    """The peak and the work of a step with one baseline."""

    peak_bytes: int
    work: Work

    @property
    def flops(self) -> int:
        return self.work.flops


@dataclass(frozen=True)
class Prediction:
    """A step with the backend at one length, in bytes and FLOPs; `baselines` has the baselines by name.

    `explained` is the summary of `streamfx.explain` for this step: its stages, options, communication. `layers_twice` are
    the FLOPs, and the FLOPs of attention alone, of gradient checkpointing that recomputes each layer completely; None without
    layers. `flows` are the values passed between loops. `curves` are, for the backend and then each baseline, the bytes alive
    along the step and the FLOPs. `frontier` has plans from the smallest peak to the fastest, if they were requested.
    """

    length: int
    batch: int
    peak_bytes: int
    peak_by_term: dict[str, int]
    work: Work
    explained: Mapping[str, Any] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)
    baselines: dict[str, StepPrediction] = field(default_factory=dict)
    layers_twice: tuple[int, int] | None = None
    overlap_intervals: tuple[OverlapInterval, ...] = ()
    host_bytes: int = 0
    flows: tuple[list[LoopTraffic], ...] = ()
    curves: Mapping[str, tuple[Curve, int]] = field(default_factory=dict, compare=False, repr=False)
    frontier: tuple[FrontierPlan, ...] = ()
    host_weights: HostWeights | None = None

    @property
    def flops(self) -> int:
        return self.work.flops

    @property
    def stages(self) -> list[dict[str, Any]]:
        return self.explained["stages"]  # type: ignore[no-any-return]


def predict(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    length: int,
    options: Mapping[str, Any],
    baselines: bool = False,
    optimizer_bytes: int = 0,
    optimizer_in_backward: bool = False,
    extra_baselines: Mapping[str, tuple[nn.Module, LayerWrapper]] = MappingProxyType({}),
    with_frontier: bool = False,
    host_weights: HostWeights | None = None,
) -> Prediction:
    """Trace a step of a model on the meta device, as compiled with `options`.

    The optimizer has a state of `optimizer_bytes`; with `optimizer_in_backward` it runs in the backward pass. The baselines are
    eager mode, gradient checkpointing, and those in `extra_baselines`. `with_frontier` adds the frontier of memory and time.
    With `host_weights`, weights, gradients and the optimizer's state are on the host, except in the baselines.
    """
    may_trace_subset = not has_ranks()  # collectives have one order across all layers
    call = traced(loss_of(model), (), inputs, dict(options), baselines, may_trace_subset)
    explanation = Explanation(call, optimizer_in_backward or host_weights is not None)
    input_bytes = sum({id(value): value.nbytes for value in inputs.values()}.values())
    constant_terms = {PARAMETERS: weight_bytes(model), OPTIMIZER: optimizer_bytes, INPUTS: input_bytes}
    constant_bytes = sum(constant_terms.values())
    summary = explanation.summary(with_baseline=baselines)
    costs, facts = explanation.costs, [graph.facts for graph in explanation.call.graphs]
    facts_by_call = [graph.facts for graph in explanation.graph_calls]
    bytes_by_term = {**constant_terms, **max(costs, key=lambda cost: cost.peak).peak_terms}
    peak = constant_bytes + int(summary["peak_bytes"])
    bytes_by_term[OTHER] = bytes_by_term.get(OTHER, 0) + peak - sum(bytes_by_term.values())
    searches = [graph_facts.search_trace for graph_facts in facts if graph_facts.search_trace is not None]
    baseline_costs = {EAGER: explanation.baseline, **explanation.baselines} if baselines else {}
    for name, (baseline_model, around) in (extra_baselines if baselines else {}).items():
        if (cost := eager_cost(loss_of(baseline_model), inputs, around, explanation.call.alike)) is not None:
            baseline_costs[name] = explanation.visible(cost)
    curves = {OURS: explanation.curves(with_baseline=baselines)[OURS]}
    for name, cost in sorted(baseline_costs.items(), key=lambda item: item[0] == EAGER):
        curves[name] = curve_of_call(cost), cost.flops
    if with_frontier and len(facts) != 1:
        raise PlanError("a frontier has the plans of one graph", found=f"{len(facts)} graphs", do="omit frontier")
    prediction = Prediction(
        length=length,
        batch=next(iter(inputs.values())).shape[0],
        peak_bytes=peak,
        peak_by_term={name: size for name, size in sorted(bytes_by_term.items(), key=lambda item: -item[1]) if size},
        work=total_work(cost.work for cost in costs),
        explained=summary,
        choices=[choice for search in searches for choice in search.as_dicts()],
        baselines={name: StepPrediction(constant_bytes + cost.peak, cost.work) for name, cost in baseline_costs.items()},
        layers_twice=_flops_with_layers_twice(explanation.baseline) if baselines else None,
        overlap_intervals=tuple(
            part for graph_facts, cost in zip(facts_by_call, costs, strict=True) for part in generate_segments(graph_facts, cost)
        ),
        host_bytes=sum(map(bytes_on_host, facts_by_call)),
        flows=tuple(map(flow_of, facts)),
        frontier=frontier_of(facts[0], explanation.call.options, constant_bytes) if with_frontier else (),
        curves={way: (curve.shifted(NO_WORK, constant_terms), flops) for way, (curve, flops) in curves.items()},
    )
    return prediction if host_weights is None else _with_host_weights(prediction, host_weights, facts_by_call)


def _with_host_weights(prediction: Prediction, weights: HostWeights, graphs: Sequence[Facts]) -> Prediction:
    """Return a prediction with the weights of one layer on the device, instead of all parameters and the optimizer's state."""
    curve, flops = prediction.curves[OURS]
    on_host = {PARAMETERS: -weights.parameter_bytes, OPTIMIZER: -weights.host[OPTIMIZER]}
    stream = weights.stream_of(graphs, prediction.overlap_intervals)
    curve = weights.added_to(curve.shifted(NO_WORK, on_host), weights.places(graphs), stream)
    at_peak = max(curve.points, key=lambda point: point.total)
    return replace(
        prediction,
        peak_bytes=at_peak.total,
        peak_by_term={name: size for name, size in sorted(at_peak.terms.items(), key=lambda item: -item[1]) if size},
        curves={**prediction.curves, OURS: (curve, flops)},
        host_bytes=prediction.host_bytes + sum(weights.host.values()) + (bytes_pinned(stream.first) if stream.first_waits else 0),
        overlap_intervals=weights.with_first_input(prediction.overlap_intervals, stream),
        host_weights=weights,
    )


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, or of this rank's part of them, without duplicates."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(map(rank_bytes, tensors.values()))


def _flops_with_layers_twice(eager: Cost) -> tuple[int, int] | None:
    """Return the FLOPs, and the FLOPs of attention alone, if each layer runs forward twice; None without layers."""
    if not eager.layer_flops:
        return None
    return eager.flops + eager.layer_flops, eager.work.attention_flops + eager.layer_attention
