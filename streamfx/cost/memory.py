"""Predict the cost of a step: run its program on fake tensors with the runtime that runs it on real ones.

Loops run only a few of their chunks (see `sampling.py`), so the time does not depend on the sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.cost.categories import GRADIENTS, terms_of
from streamfx.cost.comm import Traffic, total_traffic
from streamfx.cost.curve import Curve, Recorder
from streamfx.cost.hop_cost import with_stand_ins
from streamfx.cost.meter import Delta, Meter
from streamfx.cost.outer_categories import may_allocate, terms_between_loops
from streamfx.cost.released_gradients import ReleasedGradients, largest_copied_bytes, run_in_segments
from streamfx.cost.sampling import LoopRun, SampledLoop
from streamfx.cost.work import NO_WORK, Work
from streamfx.ir.joint import graph_copy
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop
from streamfx.runtime.outer import HostProgramRunner
from streamfx.torch_private import FakeTensorMode, is_token
from streamfx.torch_private.symbolic_sizes import size_hint


@dataclass(frozen=True)
class LoopCost:
    """The work of all chunks of a loop, the rows per chunk, the number of chunks, and the traffic to other ranks.

    `peak`: live bytes at the peak of the loop; `chunk_bytes`: those of them that the work on one chunk takes.
    """

    work: Work
    rows: int
    sent: Traffic = field(default_factory=Traffic)
    chunks: int = 0
    peak: int = 0
    chunk_bytes: int = 0

    @property
    def flops(self) -> int:
        """The FLOPs of all chunks."""
        return self.work.flops


@dataclass(frozen=True)
class Cost:
    """The cost of a step through one graph; bytes do not include parameters and inputs.

    forward_peak, backward_peak: peak bytes of both graphs; the backward peak includes all saved values. held: bytes of the
    results and saved values after the forward. layer_flops, layer_attention: forward FLOPs of the layers,
    and their attention FLOPs, if a call counts them. forward_terms, backward_terms: the bytes of both peaks by category
    (see `categories.py`). gradients: bytes of parameter gradients, for calls in eager mode. forward_traffic, backward_traffic:
    traffic of each graph to other ranks, by kind. forward_curve, backward_curve: the live bytes over time, if recorded.
    """

    forward_peak: int
    backward_peak: int
    held: int
    work: Work = NO_WORK
    loops: dict[str, LoopCost] = field(default_factory=dict)
    forward_terms: dict[str, int] = field(default_factory=dict)
    backward_terms: dict[str, int] = field(default_factory=dict)
    layer_flops: int = 0
    layer_attention: int = 0
    gradients: int = 0
    forward_traffic: Mapping[str, Traffic] = field(default_factory=dict)
    backward_traffic: Mapping[str, Traffic] = field(default_factory=dict)
    forward_curve: Curve = field(default_factory=Curve, compare=False, repr=False)
    backward_curve: Curve = field(default_factory=Curve, compare=False, repr=False)

    @property
    def flops(self) -> int:
        """The FLOPs of both graphs."""
        return self.work.flops

    @property
    def peak(self) -> int:
        """The higher of both peaks."""
        return max(self.forward_peak, self.backward_peak)

    @property
    def peak_terms(self) -> dict[str, int]:
        """The bytes of the peak by category."""
        return self.forward_terms if self.forward_peak >= self.backward_peak else self.backward_terms

    @property
    def streamed_flops(self) -> int:
        """The FLOPs that run in loops."""
        return sum(loop.flops for loop in self.loops.values())

    @property
    def streamed_share(self) -> float:
        """The share of FLOPs in loops; without FLOPs, 1 if there are loops, else 0."""
        return streamed_share([self])


def streamed_share(costs: Sequence[Cost], missing: int = 0) -> float:
    """Return the share of the FLOPs of calls that are in loops; `missing` FLOPs add to the total."""
    flops = sum(cost.flops for cost in costs) + missing
    return sum(cost.streamed_flops for cost in costs) / flops if flops else float(any(cost.loops for cost in costs))


def cost_of(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    num_outputs: int,
    loss: frozenset[str] = frozenset(),
    released: ReleasedGradients | None = None,
    recorded: bool = False,
    known_runs: dict[Any, LoopRun] | None = None,
) -> Cost:
    """Run the forward and backward graph on fake tensors; the caller keeps the forward results during the backward.

    `loss` has the names of the values of the loss stage (see `loss_values`). `released` is set if gradients are released
    during the backward. Curves are empty unless `recorded`. `known_runs` caches the costs of loops between calls.
    """
    meter = Meter()
    meter.recorder = Recorder() if recorded else None
    known_runs = {} if known_runs is None else known_runs
    forward = with_sampled_loops(forward, meter, known_runs, is_backward=False, loss=loss)
    backward = None if backward is None else with_sampled_loops(backward, meter, known_runs, is_backward=True, loss=loss)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        placeholders = forward.graph.find_nodes(op="placeholder")
        inputs = [tensor_like(node.meta[VALUE]) for node in placeholders]
        inputs_but_tokens = [value for node, value in zip(placeholders, inputs, strict=True) if not is_token(node)]
        with meter:
            results = list(HostProgramRunner(forward)(list(inputs)))
            meter.flush()
            forward_terms = meter.peak_terms
            forward_peak, held, forward_work = meter.restart_peak(), meter.live, meter.work
            forward_curve = meter.take_curve(Work())
            outputs, saved = results[:num_outputs], results[num_outputs:]
            del results
            gradients = None
            if backward is not None and released is not None:
                run_in_segments(backward, _backward_arguments(backward, saved), released, inputs, meter)
            elif backward is not None:
                gradients = HostProgramRunner(backward)(_backward_arguments(backward, saved))
            meter.flush()
            if copied_bytes := largest_copied_bytes(inputs_but_tokens, gradients or ()):
                meter.add_peak(Delta(copied_bytes, {GRADIENTS: copied_bytes}))
            cost = Cost(
                forward_peak=forward_peak,
                backward_peak=meter.peak if backward is not None else 0,
                held=held,
                work=meter.work,
                loops={**_loop_costs(forward), **_loop_costs(backward)},
                forward_terms=_nonzero(forward_terms),
                backward_terms=_nonzero(meter.peak_terms),
                forward_traffic=forward_work.traffic_by_kind,
                backward_traffic=meter.work.minus(forward_work).traffic_by_kind,
                forward_curve=forward_curve,
                backward_curve=meter.take_curve(forward_work) if backward is not None else Curve(),
            )
        del outputs, gradients, inputs, inputs_but_tokens
    return cost


def _backward_arguments(backward: fx.GraphModule, saved: list[Any]) -> list[Any]:
    """Return the inputs of the backward graph: saved values, with numbers first, and new tangents. `saved` is emptied."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    arguments = sorted(saved, key=lambda value: not isinstance(value, (int, float)))
    saved.clear()
    return arguments + [tensor_like(node.meta[VALUE]) for node in placeholders[len(arguments) :]]


def _nonzero(terms: Mapping[str, int]) -> dict[str, int]:
    """Return the nonzero bytes by category, the largest first."""
    return {name: size for name, size in sorted(terms.items(), key=lambda item: -item[1]) if size}


def with_sampled_loops(
    module: fx.GraphModule, meter: Meter, known_runs: dict[Any, LoopRun], is_backward: bool, loss: frozenset[str]
) -> fx.GraphModule:
    """Copy a host program with loops that run only a few of their chunks, and with bytes counted by category."""
    outer_terms = terms_between_loops(module, is_backward)
    terms = terms_of(module, is_backward, outer_terms, loss)
    metered = with_stand_ins(module, meter, tensor_like)
    if outer_terms:
        metered = fx.GraphModule(metered, graph_copy(metered.graph))
        for node in metered.graph.nodes:
            if node.name in outer_terms and may_allocate(node):
                node.target = meter.with_term(outer_terms[node.name], node.target)
    for name, child in module.named_children():
        if isinstance(child, Loop):
            metered.add_module(name, SampledLoop(child.spec, meter, terms[name], known_runs))
    return metered


def tensor_like(value: Any) -> Any:
    """Create a tensor with the metadata of a traced tensor, with symbolic sizes at their traced values.

    Return the traced value of a symbolic integer, and other values unchanged.
    """
    if not isinstance(value, Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    size, stride = ([size_hint(symbolic) for symbolic in dims] for dims in (value.shape, value.stride()))
    tensor = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    tensor = torch.ops.aten._conj(tensor) if value.is_conj() else tensor
    return torch.ops.aten._neg_view(tensor) if value.is_neg() else tensor


def bytes_like(value: Any) -> int:
    """Return the bytes of a traced tensor, at the traced sizes; 0 for other values."""
    if not isinstance(value, Tensor):
        return 0
    numel = 1
    for size in value.shape:
        numel *= size_hint(size)
    return numel * value.element_size()


def bytes_of_values(nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the tensors of these nodes, each counted once."""
    return sum(bytes_like(node.meta.get(VALUE)) for node in set(nodes))


def _loop_costs(module: fx.GraphModule | None) -> dict[str, LoopCost]:
    """Return the cost of each sampled loop of a host program, by the loop's name; none without a program.

    The rows per chunk are at most those of the sequence.
    """
    if module is None:
        return {}
    loops = {name: child for name, child in module.named_children() if isinstance(child, SampledLoop)}
    sent = {name: total_traffic(loop.work.traffic_by_kind.values()) for name, loop in loops.items()}
    return {
        name: LoopCost(loop.work, min(loop.rows, loop.length), sent[name], loop.num_chunks, loop.peak, loop.chunk_bytes)
        for name, loop in loops.items()
    }
