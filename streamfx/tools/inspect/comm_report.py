"""The communication of a step: collective calls, and the bytes each rank sends, compared with eager.

`forward` and `backward` count `gathers`, `reductions` and `exchanges` between loops (or in the full graph if it is not
chunked) by kind. `in_loops` counts calls in loop bodies times the number of chunks. `bytes` is the total; `far_bytes`
counts only groups that span several machines, with 8 consecutive ranks per machine. `early_reductions` is the fraction
of the backward graph's reductions between loops that start before its last loop (None if there are none).
`whole_weights_bytes` are the gathered weights alive at the peak. `eager` is the same call run in eager mode on fake
tensors; `checkpointed` is true if each layer is checkpointed there (with torch's non-reentrant checkpointing), which
happens if the model has layers. `eager` is None if the run fails or sends nothing.
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
    bytes_between_machines,
    bytes_of,
    calls_of,
    sent_by_program,
    sum_traffic,
    traffic_of_graphs,
)


def wire_of(graphs: Sequence[TracedGraph], costs: Sequence[Cost], call: TracedCall | None = None) -> dict[str, Any] | None:
    """Return the communication of these graphs, with the communication of `call` in eager mode, or None if nothing is sent."""
    pairs = list(zip(graphs, costs, strict=True))
    traffic = [_host_traffic(graph, cost) for graph, cost in pairs]
    sent = sum_traffic(wire for host_traffic in traffic for wire in host_traffic.by_loop.values())
    if not calls_of(sent):
        return None
    early, reductions = (
        sum(counts) for counts in zip(*((host_traffic.early, host_traffic.reductions) for host_traffic in traffic), strict=True)
    )
    peak = max(costs, key=lambda cost: cost.peak)
    return {
        **as_plain(sent),
        "bytes": bytes_of(sent),
        "far_bytes": bytes_between_machines(sent),
        "early_reductions": early / reductions if reductions else None,
        "whole_weights_bytes": peak.peak_terms.get(WEIGHTS, 0),
        "eager": None if call is None else _eager_traffic(call),
    }


def _host_traffic(graph: TracedGraph, cost: Cost) -> HostTraffic:
    """Return the communication of a graph by loop, or as one entry if it is not chunked."""
    program = graph.facts.program
    if program is None:
        return HostTraffic({"": traffic_of_graphs(cost.forward_traffic, cost.backward_traffic)}, 0, 0)
    return sent_by_program(program, graph.num_outputs, cost.loops)


def _eager_traffic(call: TracedCall) -> dict[str, Any] | None:
    """Return the communication in eager mode, checkpointed if there are layers; None if unknown or nothing is sent."""
    cost = call.eager if call.checkpointed is None else call.checkpointed
    if cost is None:
        return None
    sent = traffic_of_graphs(cost.forward_traffic, cost.backward_traffic)
    if not calls_of(sent):
        return None
    return {**as_plain(sent), "bytes": bytes_of(sent), "checkpointed": call.checkpointed is not None}
