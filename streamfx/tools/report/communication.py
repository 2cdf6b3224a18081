"""The communication of a step: collective calls, and the bytes each rank sends, by the stage that they serve.

A gather belongs to the first loop that reads the gathered value. A reduction, or any other collective between loops, belongs to
the last loop that computes its operand. A collective in a loop body belongs to that loop. The assignment follows def-use chains
only, never names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from streamfx.cost.categories import WEIGHTS
from streamfx.cost.comm import GATHERS, KINDS, REDUCTIONS, CallTraffic, Traffic, total_traffic, traffic_of_node
from streamfx.cost.memory import Cost, LoopCost
from streamfx.ir.facts import Facts
from streamfx.ir.joint import saved_values
from streamfx.ir.program import Program
from streamfx.runtime.loop import Loop

IN_LOOPS = "in_loops"
COLUMNS = (*KINDS, IN_LOOPS)
FORWARD, BACKWARD = HALVES = "forward", "backward"
Wire = dict[str, dict[str, Traffic]]  # by half, by column


# -- the whole step


def communication_of(
    graphs: Sequence[Facts], costs: Sequence[Cost], eager: Cost | None = None, is_checkpointed: bool = False
) -> dict[str, Any] | None:
    """Return the communication of a step as values that JSON can represent, or None if nothing is sent.

    `forward` and `backward` count `gathers`, `reductions` and `exchanges` between loops (or in the full graph if it is not
    chunked) by kind. `in_loops` counts calls in loop bodies times the number of chunks. `bytes` is the total; `far_bytes`
    counts only groups that span several machines, with 8 consecutive ranks per machine. `early_reductions` is the fraction
    of the backward graph's reductions between loops that start before its last loop (None if there are none).
    `whole_weights_bytes` are the gathered weights alive at the peak. `eager` is the same step run in eager mode on fake
    tensors (None if unknown, or if it sends nothing); `checkpointed` is true if each layer is checkpointed there.

    Args:
        graphs: The facts of each graph call.
        costs: The cost of each graph call.
        eager: The cost of the step in eager mode, if known.
        is_checkpointed: Whether each layer is checkpointed in `eager`.
    """
    traffic = [_host_traffic(facts, cost) for facts, cost in zip(graphs, costs, strict=True)]
    sent, eager_sent = sum_traffic(wire for one in traffic for wire in one.by_loop.values()), _halves_of_cost(eager)
    total, eager_total = total_of(sent), total_of(eager_sent)
    if not total.calls:
        return None
    reductions = sum(one.reductions for one in traffic)
    return {
        **as_plain(sent),
        "bytes": total.bytes,
        "far_bytes": total.far,
        "early_reductions": sum(one.early for one in traffic) / reductions if reductions else None,
        "whole_weights_bytes": max(costs, key=lambda cost: cost.peak).peak_terms.get(WEIGHTS, 0),
        "eager": {**as_plain(eager_sent), "bytes": eager_total.bytes, "checkpointed": is_checkpointed}
        if eager_total.calls
        else None,
    }


def sum_traffic(parts: Iterable[Mapping[str, Mapping[str, Traffic]]]) -> Wire:
    """Return the sum of the traffic of several parts of a step, with all halves and columns."""
    total: Wire = {half: dict.fromkeys(COLUMNS, Traffic()) for half in HALVES}
    for part in parts:
        for half, columns in part.items():
            for column, traffic in columns.items():
                total[half][column] = total[half][column].plus(traffic)
    return total


def total_of(wire: Wire) -> Traffic:
    """Return the sum over halves and columns."""
    return total_traffic(traffic for columns in wire.values() for traffic in columns.values())


def as_plain(wire: Wire) -> dict[str, dict[str, dict[str, int]]]:
    """Convert the traffic to values that JSON can represent."""
    return {
        half: {column: {"calls": traffic.calls, "bytes": traffic.bytes} for column, traffic in columns.items()}
        for half, columns in wire.items()
    }


# -- by loop


@dataclass(frozen=True)
class HostTraffic:
    """The traffic of a program by the loop that it serves.

    Of the `reductions` between loops of the backward graph, `early` begin before the last loop does.
    """

    by_loop: dict[str, Wire]
    early: int = 0
    reductions: int = 0


def _host_traffic(facts: Facts, cost: Cost) -> HostTraffic:
    """Return the traffic of a graph by loop, or as one entry if it is not chunked."""
    if facts.program is None:
        return HostTraffic({"": _halves_of_cost(cost)})
    return sent_by_program(facts.program, len(facts.joint.outputs), cost.loops)


def _halves_of_cost(cost: Cost | None) -> Wire:
    """Return the traffic of a forward and a backward graph without loops; no traffic for no cost."""
    return sum_traffic([] if cost is None else [{FORWARD: cost.forward_traffic, BACKWARD: cost.backward_traffic}])


def sent_by_program(program: Program, num_outputs: int, costs: Mapping[str, LoopCost]) -> HostTraffic:
    """Return the traffic by loop name: collectives between loops, and collectives that the chunks of each loop run."""
    halves = halves_of(program, num_outputs)
    by_loop: dict[str, Wire] = {}
    for name, half in halves:
        for loop, sent in half.sent():
            traffic = by_loop.setdefault(loop, sum_traffic([]))[name]
            traffic[sent.kind] = traffic[sent.kind].plus(sent.traffic)
        for loop in half.loops.values():
            if costs[loop].sent.calls:
                by_loop.setdefault(loop, sum_traffic([]))[name][IN_LOOPS] = costs[loop].sent
    early, reductions = halves[-1][1].early() if program.backward is not None else (0, 0)
    return HostTraffic(by_loop, early, reductions)


def halves_of(program: Program, num_outputs: int) -> list[tuple[str, ProgramTraffic]]:
    """Return the host programs: forward, and backward if there is one."""
    forward = ProgramTraffic(program.forward, {})
    if program.backward is None:
        return [(FORWARD, forward)]
    saved = saved_values(program.forward.graph, program.backward.graph, num_outputs)
    writer_loop = {input_: forward.writer_loop[node] for input_, node in saved.items() if node in forward.writer_loop}
    return [(FORWARD, forward), (BACKWARD, ProgramTraffic(program.backward, writer_loop))]


@dataclass
class ProgramTraffic:
    """A host program. `writer_loop` maps each value to the last loop that computes it, inputs to a loop of the forward graph."""

    module: fx.GraphModule
    writer_loop: dict[fx.Node, str]
    loops: dict[fx.Node, str] = field(init=False)
    reader_loop: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the first loop that reads a value or a result of it

    def __post_init__(self) -> None:
        """Find for each node the last loop before it and the first loop after it along def-use chains."""
        calls = self.module.graph.find_nodes(op="call_module")
        loops = {node: self.module.get_submodule(node.target) for node in calls}
        self.loops = {node: loop.spec.name for node, loop in loops.items() if isinstance(loop, Loop)}
        position = {node: i for i, node in enumerate(self.module.graph.nodes)}
        last_loop: dict[fx.Node, fx.Node] = {}  # the last loop that a node depends on, or the node itself if it is a loop
        for node in self.module.graph.nodes:
            loops_before = [last_loop[source] for source in node.all_input_nodes if source in last_loop]
            loops_of_inputs = [self.writer_loop[source] for source in node.all_input_nodes if source in self.writer_loop]
            if node in self.loops or loops_before:
                last_loop[node] = node if node in self.loops else max(loops_before, key=position.__getitem__)
                self.writer_loop[node] = self.loops[last_loop[node]]
            elif loops_of_inputs:
                self.writer_loop[node] = loops_of_inputs[-1]
        for node in reversed(self.module.graph.nodes):
            users = [user if user in self.loops else self.reader_loop.get(user) for user in node.users]
            if loops_after := [user for user in users if user is not None]:
                self.reader_loop[node] = min(loops_after, key=position.__getitem__)

    def sent(self) -> Iterable[tuple[str, CallTraffic]]:
        """Yield the collectives between loops, each with the loop that it serves."""
        for node, loop_before in self.between():
            if (sent := traffic_of_node(node)) is not None:
                yield self.loop_of(node, sent.kind == GATHERS, loop_before), sent

    def between(self) -> Iterable[tuple[fx.Node, str]]:
        """Yield all nodes, each with the last loop before it; nodes before the first loop get the first loop."""
        loop_before = next(iter(self.loops.values()), "")
        for node in self.module.graph.nodes:
            loop_before = self.loops.get(node, loop_before)
            yield node, loop_before

    def loop_of(self, node: fx.Node, is_for_users: bool, loop_before: str) -> str:
        """Return the loop that a collective serves.

        If `is_for_users`, this is the first loop that uses its result, or else the last loop that computes its operands;
        otherwise the reverse. If neither exists, it is `loop_before`.
        """
        reader, writer = self.reader_loop.get(node), self.writer_loop.get(node)
        loop_of_reader = None if reader is None else self.loops[reader]
        return (loop_of_reader or writer if is_for_users else writer or loop_of_reader) or loop_before

    def early(self) -> tuple[int, int]:
        """Return the number of reductions that begin before the last loop, and the number of all reductions."""
        sent = {node: traffic_of_node(node) for node in self.module.graph.nodes}
        order = [node for node, call in sent.items() if node in self.loops or (call is not None and call.kind == REDUCTIONS)]
        last_loop = max((i for i, node in enumerate(order) if node in self.loops), default=-1)
        return sum(node not in self.loops for node in order[:last_loop]), len(order) - len(self.loops)
