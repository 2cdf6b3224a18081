"""What does a step send to other ranks, and what would eager? Calls, and bytes that each rank puts on the wire.

`forward` and `backward`: by kind, `gathers`, `reductions` and `exchanges` between loops (of a graph that runs as it stands: all),
and `in_loops`, those of bodies times their chunks. `bytes`: all of them; `far_bytes`: those of groups
that do not lie inside of a machine of 8 ranks, one beside the other. `early_reductions`: the share of the reductions between
loops of the backward half that begin before its last loop does (None without any). `whole_weights_bytes`: gathered weights that
are alive at the peak. `eager`: the same call run in eager on fake tensors, call by call as it would send; `checkpointed` says
whether each layer is checkpointed there (with torch's non-reentrant checkpointing), which it is where the model has layers. None
where it could not be run, or seems to send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamfx.cost.categories import WEIGHTS
from streamfx.cost.memory import Cost
from streamfx.tools.inspect.tracing import TracedCall, TracedGraph
from streamfx.tools.report.comm_table import (
    HostTraffic,
    as_plain,
    bytes_of,
    calls_of,
    far_of,
    of_halves,
    sent_by_program,
    together,
)


def wire_of(graphs: Sequence[TracedGraph], costs: Sequence[Cost], call: TracedCall | None = None) -> dict[str, Any] | None:
    """What the calls of these graphs send, beside what `call` sends in eager; None where nothing is sent."""
    pairs = list(zip(graphs, costs, strict=True))
    outer = [_outer(graph, cost) for graph, cost in pairs]
    sent = together(wire for one in outer for wire in one.by_loop.values())
    if not calls_of(sent):
        return None
    early, reductions = (sum(counts) for counts in zip(*((one.early, one.reductions) for one in outer), strict=True))
    peak = max(costs, key=lambda cost: cost.peak)
    return {
        **as_plain(sent),
        "bytes": bytes_of(sent),
        "far_bytes": far_of(sent),
        "early_reductions": early / reductions if reductions else None,
        "whole_weights_bytes": peak.peak_terms.get(WEIGHTS, 0),
        "eager": None if call is None else _in_eager(call),
    }


def _outer(graph: TracedGraph, cost: Cost) -> HostTraffic:
    program = graph.facts.program
    if program is None:
        return HostTraffic({"": of_halves(cost.forward_wire, cost.backward_wire)}, 0, 0)
    return sent_by_program(program, graph.num_outputs, cost.loops)


def _in_eager(call: TracedCall) -> dict[str, Any] | None:
    cost = call.eager if call.checkpointed is None else call.checkpointed
    if cost is None:
        return None
    sent = of_halves(cost.forward_wire, cost.backward_wire)
    if not calls_of(sent):
        return None
    return {**as_plain(sent), "bytes": bytes_of(sent), "checkpointed": call.checkpointed is not None}
