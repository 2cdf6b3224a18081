"""Predicts what a step costs: its program is run on fake tensors, by the runtime that runs it on real ones.

Loops run few of their chunks (see `sampling.py`), so the time does not depend on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.cost.categories import GRADIENTS, terms_of
from streamfx.cost.comm import Traffic, added
from streamfx.cost.curve import Curve, Recorder
from streamfx.cost.gradient_copies import largest_copied
from streamfx.cost.hop_cost import with_stand_ins
from streamfx.cost.meter import Delta, Meter
from streamfx.cost.outer_categories import makes_memory, terms_between
from streamfx.cost.released_gradients import ReleasedGradients, run_in_stretches
from streamfx.cost.sampling import LoopRun, SampledLoop
from streamfx.cost.work import NO_WORK, Work
from streamfx.ir.joint import graph_copy
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop
from streamfx.runtime.outer import OuterRunner
from streamfx.torch_private import FakeTensorMode, is_token
from streamfx.torch_private.symbolic_sizes import size_hint


@dataclass(frozen=True)
class LoopCost:
    """The work of all chunks of a loop, the rows that a chunk has, how many there are, and what they send to other ranks."""

    work: Work
    rows: int
    sent: Traffic = field(default_factory=Traffic)
    chunks: int = 0

    @property
    def flops(self) -> int:
        return self.work.flops


@dataclass(frozen=True)
class Cost:
    """What a step through one graph costs; bytes do not count parameters and inputs.

    forward_peak: bytes at most in the forward half; backward_peak: in the backward half, all that was kept for it included.
    held: bytes that the forward half leaves: results and saved values. layer_flops, layer_attention: FLOPs, and those of
    attention, of the forward half of layers, of calls in which these were asked for. forward_terms, backward_terms: the bytes
    of both peaks, by what they are for (see `categories.py`). gradients: bytes of those of parameters, of calls in eager.
    forward_wire, backward_wire: what each half sends to other ranks, by kind. forward_curve, backward_curve: how bytes come and
    go, where that is recorded.
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
    forward_wire: Mapping[str, Traffic] = field(default_factory=dict)
    backward_wire: Mapping[str, Traffic] = field(default_factory=dict)
    forward_curve: Curve = field(default_factory=Curve, compare=False, repr=False)
    backward_curve: Curve = field(default_factory=Curve, compare=False, repr=False)

    @property
    def flops(self) -> int:
        return self.work.flops

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def peak_terms(self) -> dict[str, int]:
        """What the bytes of the peak are for."""
        return self.forward_terms if self.forward_peak >= self.backward_peak else self.backward_terms

    @property
    def streamed_flops(self) -> int:
        return sum(loop.flops for loop in self.loops.values())

    @property
    def streamed_share(self) -> float:
        """Of the FLOPs, those in loops; of none, whether there are loops."""
        return streamed_share([self])


def streamed_share(costs: Sequence[Cost], missing: int = 0) -> float:
    """Of the FLOPs of calls, and of those that are `missing` in them, the part in loops."""
    flops = sum(cost.flops for cost in costs) + missing
    return sum(cost.streamed_flops for cost in costs) / flops if flops else float(any(cost.loops for cost in costs))


def cost_of(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    num_outputs: int,
    loss: frozenset[str] = frozenset(),
    handed: ReleasedGradients | None = None,
    recorded: bool = False,
) -> Cost:
    """Run both halves of a graph on fake tensors; the caller keeps the results of the forward half during the backward half.

    `loss` are names of the values of the loss stage (see `loss_values`), `handed` is given where gradients are taken meanwhile.
    Curves are there if they are to be `recorded`.
    """
    meter = Meter()
    meter.recorder = Recorder() if recorded else None
    known: dict[Any, LoopRun] = {}
    forward = sampled(forward, meter, known, False, loss)
    backward = None if backward is None else sampled(backward, meter, known, True, loss)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        placeholders = forward.graph.find_nodes(op="placeholder")
        inputs = [made_like(node.meta[VALUE]) for node in placeholders]
        given = [value for node, value in zip(placeholders, inputs, strict=True) if not is_token(node)]
        with meter:
            results = list(OuterRunner(forward)(list(inputs)))
            meter.flush()
            forward_terms = meter.peak_terms
            forward_peak, held, forward_work = meter.restart_peak(), meter.live, meter.work
            forward_curve = meter.recorded(Work())
            outputs, saved = results[:num_outputs], results[num_outputs:]
            del results
            gradients = None
            if backward is not None and handed is not None:
                run_in_stretches(backward, _given_backward(backward, saved), handed, inputs, meter)
            elif backward is not None:
                gradients = OuterRunner(backward)(_given_backward(backward, saved))
            meter.flush()
            if copied := largest_copied(given, gradients or ()):
                meter.reached(Delta(copied, {GRADIENTS: copied}))
            cost = Cost(
                forward_peak=forward_peak,
                backward_peak=meter.peak if backward is not None else 0,
                held=held,
                work=meter.work,
                loops={**_loop_costs(forward), **_loop_costs(backward)},
                forward_terms=_nonzero(forward_terms),
                backward_terms=_nonzero(meter.peak_terms),
                forward_wire=forward_work.wire,
                backward_wire=meter.work.minus(forward_work).wire,
                forward_curve=forward_curve,
                backward_curve=meter.recorded(forward_work) if backward is not None else Curve(),
            )
        del outputs, gradients, inputs, given
    return cost


def _given_backward(backward: fx.GraphModule, saved: list[Any]) -> list[Any]:
    """What was saved (numbers last, which the backward half takes first) and gradients of the results."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    arguments = sorted(saved, key=lambda value: not isinstance(value, (int, float)))
    saved.clear()
    return arguments + [made_like(node.meta[VALUE]) for node in placeholders[len(arguments) :]]


def _nonzero(terms: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sorted(terms.items(), key=lambda item: -item[1]) if size}


def sampled(
    module: fx.GraphModule, meter: Meter, known: dict[Any, LoopRun], is_backward: bool, loss: frozenset[str]
) -> fx.GraphModule:
    """The same outer graph, with loops that run few of their chunks, and bytes counted under their terms."""
    between = terms_between(module, is_backward)
    terms = terms_of(module, is_backward, between, loss)
    copied = with_stand_ins(module, meter, made_like)
    if between:
        copied = fx.GraphModule(copied, graph_copy(copied.graph))
        for node in copied.graph.nodes:
            if node.name in between and makes_memory(node):
                node.target = meter.named(between[node.name], node.target)
    for name, child in module.named_children():
        if isinstance(child, Loop):
            copied.add_module(name, SampledLoop(child.spec, meter, terms[name], known))
    return copied


def made_like(value: Any) -> Any:
    """A tensor like the one that a value of the trace stands for, with symbolic sizes as they were when traced."""
    if not isinstance(value, Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    size, stride = ([size_hint(item) for item in items] for items in (value.shape, value.stride()))
    made = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    made = torch.ops.aten._conj(made) if value.is_conj() else made
    return torch.ops.aten._neg_view(made) if value.is_neg() else made


def bytes_like(value: Any) -> int:
    """Bytes of the tensor that a value of the trace stands for."""
    if not isinstance(value, Tensor):
        return 0
    count = 1
    for size in value.shape:
        count *= size_hint(size)
    return count * value.element_size()


def bytes_of_values(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the tensors that these nodes stand for, each counted once."""
    return sum(bytes_like(node.meta.get(VALUE)) for node in set(nodes))


def _loop_costs(module: fx.GraphModule | None) -> dict[str, LoopCost]:
    if module is None:
        return {}
    loops = {name: child for name, child in module.named_children() if isinstance(child, SampledLoop)}
    return {name: _loop_cost(loop) for name, loop in loops.items()}


def _loop_cost(loop: SampledLoop) -> LoopCost:
    return LoopCost(loop.work, min(loop.rows, loop.length), added(loop.work.wire.values()), loop.count)
