"""Assign each collective of a step to the stage that it serves.

A gather belongs to the first loop that reads the gathered value. A reduction, or any other collective between loops, belongs to
the last loop that computes its operand. A collective in a loop body belongs to that loop. The assignment follows def-use chains
only, never names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from streamfx.cost.comm import GATHERS, KINDS, REDUCTIONS, CallTraffic, Traffic, traffic_of_node
from streamfx.cost.memory import LoopCost
from streamfx.ir.joint import saved_values
from streamfx.ir.program import Program
from streamfx.runtime.loop import Loop

IN_LOOPS = "in_loops"
COLUMNS = (*KINDS, IN_LOOPS)
FORWARD, BACKWARD = HALVES = "forward", "backward"
Wire = dict[str, dict[str, Traffic]]  # by half, by column


def empty_wire() -> Wire:
    """Return no traffic in either graph."""
    return {half: dict.fromkeys(COLUMNS, Traffic()) for half in HALVES}


def sum_traffic(traffic_parts: Iterable[Wire]) -> Wire:
    """Return the sum of the traffic of several parts of a step."""
    total = empty_wire()
    for wire in traffic_parts:
        for half, columns in wire.items():
            for column, traffic in columns.items():
                total[half][column] = total[half][column].plus(traffic)
    return total


def bytes_of(wire: Wire) -> int:
    """Return the number of bytes of all collectives."""
    return sum(traffic.bytes for columns in wire.values() for traffic in columns.values())


def bytes_between_machines(wire: Wire) -> int:
    """Return the number of bytes that leave the machine."""
    return sum(traffic.far for columns in wire.values() for traffic in columns.values())


def calls_of(wire: Wire) -> int:
    """Return the number of all collective calls."""
    return sum(traffic.calls for columns in wire.values() for traffic in columns.values())


def as_plain(wire: Wire) -> dict[str, dict[str, dict[str, int]]]:
    """Convert the traffic to values that JSON can represent."""
    return {half: {name: _traffic_dict(traffic) for name, traffic in columns.items()} for half, columns in wire.items()}


def _traffic_dict(traffic: Traffic) -> dict[str, int]:
    return {"calls": traffic.calls, "bytes": traffic.bytes}


def traffic_of_graphs(forward: Mapping[str, Traffic], backward: Mapping[str, Traffic]) -> Wire:
    """Return the traffic of a forward and a backward graph without loops."""
    return sum_traffic([{FORWARD: dict(forward), BACKWARD: dict(backward)}])


@dataclass(frozen=True)
class HostTraffic:
    """The traffic of a program by the loop that it serves.

    Of the `reductions` between loops of the backward graph, `early` begin before the last loop does.
    """

    by_loop: dict[str, Wire]
    early: int
    reductions: int


def halves_of(program: Program, num_outputs: int) -> list[tuple[str, ProgramTraffic]]:
    """Return the host programs: forward, and backward if there is one."""
    forward = ProgramTraffic(program.forward, {})
    if program.backward is None:
        return [(FORWARD, forward)]
    saved = saved_values(program.forward.graph, program.backward.graph, num_outputs)
    writer_loop = {input_: forward.writer_loop[node] for input_, node in saved.items() if node in forward.writer_loop}
    return [(FORWARD, forward), (BACKWARD, ProgramTraffic(program.backward, writer_loop))]


def sent_by_program(program: Program, num_outputs: int, costs: Mapping[str, LoopCost]) -> HostTraffic:
    """Return the traffic by loop name: collectives between loops, and collectives that the chunks of each loop run."""
    halves = halves_of(program, num_outputs)
    by_loop: dict[str, Wire] = {}
    for name, half in halves:
        for loop, sent in half.sent():
            traffic = by_loop.setdefault(loop, empty_wire())[name]
            traffic[sent.kind] = traffic[sent.kind].plus(sent.traffic)
        for loop in half.loops.values():
            if costs[loop].sent.calls:
                by_loop.setdefault(loop, empty_wire())[name][IN_LOOPS] = costs[loop].sent
    early, reductions = halves[-1][1].early() if program.backward is not None else (0, 0)
    return HostTraffic(by_loop, early, reductions)


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
        order = [node for node in self.module.graph.nodes if node in self.loops or _is_reduction(node)]
        last_loop = max((i for i, node in enumerate(order) if node in self.loops), default=-1)
        return sum(node not in self.loops for node in order[:last_loop]), len(order) - len(self.loops)


def _is_reduction(node: fx.Node) -> bool:
    """Return whether a node is a collective that reduces."""
    sent = traffic_of_node(node)
    return sent is not None and sent.kind == REDUCTIONS
