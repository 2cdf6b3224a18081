"""Whose are the calls that a step sends to other ranks? Each belongs to the stage for which it runs.

A gather belongs to the first loop that is given what it gathers; a reduction, and any other collective between loops, to the last
loop that makes its operand. What a body sends belongs to its loop. All follow from who uses what, none from a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from streamfx.cost.comm import GATHERS, KINDS, REDUCTIONS, Sent, Traffic, sent_by_node
from streamfx.cost.memory import LoopCost
from streamfx.ir.joint import handed_over
from streamfx.ir.program import Program
from streamfx.runtime.loop import Loop

IN_LOOPS = "in_loops"
COLUMNS = (*KINDS, IN_LOOPS)
FORWARD, BACKWARD = HALVES = "forward", "backward"
Wire = dict[str, dict[str, Traffic]]  # by half, by column


def nothing() -> Wire:
    return {half: dict.fromkeys(COLUMNS, Traffic()) for half in HALVES}


def together(parts: Iterable[Wire]) -> Wire:
    """The sum of what several parts of a step send."""
    total = nothing()
    for part in parts:
        for half, columns in part.items():
            for column, traffic in columns.items():
                total[half][column] = total[half][column].plus(traffic)
    return total


def bytes_of(wire: Wire) -> int:
    return sum(traffic.bytes for columns in wire.values() for traffic in columns.values())


def far_of(wire: Wire) -> int:
    """Bytes that leave the machine."""
    return sum(traffic.far for columns in wire.values() for traffic in columns.values())


def calls_of(wire: Wire) -> int:
    return sum(traffic.calls for columns in wire.values() for traffic in columns.values())


def as_plain(wire: Wire) -> dict[str, dict[str, dict[str, int]]]:
    """In values that JSON knows."""
    return {half: {name: _plain(traffic) for name, traffic in columns.items()} for half, columns in wire.items()}


def _plain(traffic: Traffic) -> dict[str, int]:
    return {"calls": traffic.calls, "bytes": traffic.bytes}


def of_halves(forward: Mapping[str, Traffic], backward: Mapping[str, Traffic]) -> Wire:
    """What two halves without loops send."""
    return together([{FORWARD: dict(forward), BACKWARD: dict(backward)}])


@dataclass(frozen=True)
class HostTraffic:
    """What a program sends, and for which loop. `early` of the `reductions` between loops of the backward half begin before the
    last loop does.
    """

    by_loop: dict[str, Wire]
    early: int
    reductions: int


def halves_of(program: Program, num_outputs: int) -> list[tuple[str, HostProgram]]:
    """Both halves, or the one that there is."""
    forward = HostProgram(program.forward, {})
    if program.backward is None:
        return [(FORWARD, forward)]
    saved = handed_over(program.forward.graph, program.backward.graph, num_outputs)
    made = {taken: forward.made_by[node] for taken, node in saved.items() if node in forward.made_by}
    return [(FORWARD, forward), (BACKWARD, HostProgram(program.backward, made))]


def sent_by_program(program: Program, num_outputs: int, costs: Mapping[str, LoopCost]) -> HostTraffic:
    """By the name of a loop what is sent for it, and by its chunks."""
    found = halves_of(program, num_outputs)
    by_loop: dict[str, Wire] = {}
    for name, half in found:
        for loop, sent in half.sent():
            own = by_loop.setdefault(loop, nothing())[name]
            own[sent.kind] = own[sent.kind].plus(sent.traffic)
        for loop in half.loops.values():
            if costs[loop].sent.calls:
                by_loop.setdefault(loop, nothing())[name][IN_LOOPS] = costs[loop].sent
    early, reductions = found[-1][1].early() if program.backward is not None else (0, 0)
    return HostTraffic(by_loop, early, reductions)


@dataclass
class HostProgram:
    """An outer graph; `made_by` says of a value which loop has made it last, of inputs that of the half before."""

    module: fx.GraphModule
    made_by: dict[fx.Node, str]
    loops: dict[fx.Node, str] = field(init=False)
    used_by: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the first loop that is given what comes of a value

    def __post_init__(self) -> None:
        calls = self.module.graph.find_nodes(op="call_module")
        loops = {node: self.module.get_submodule(node.target) for node in calls}
        self.loops = {node: loop.spec.name for node, loop in loops.items() if isinstance(loop, Loop)}
        position = {node: i for i, node in enumerate(self.module.graph.nodes)}
        last: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            before = [last[source] for source in node.all_input_nodes if source in last]
            given = [self.made_by[source] for source in node.all_input_nodes if source in self.made_by]
            if node in self.loops or before:
                last[node] = node if node in self.loops else max(before, key=position.__getitem__)
                self.made_by[node] = self.loops[last[node]]
            elif given:
                self.made_by[node] = given[-1]
        for node in reversed(self.module.graph.nodes):
            users = [user if user in self.loops else self.used_by.get(user) for user in node.users]
            if behind := [user for user in users if user is not None]:
                self.used_by[node] = min(behind, key=position.__getitem__)

    def sent(self) -> Iterable[tuple[str, Sent]]:
        """What stands between loops, and the loop for which it is sent."""
        for node, before in self.between():
            if (sent := sent_by_node(node)) is not None:
                yield self.loop_of(node, sent.kind == GATHERS, before), sent

    def between(self) -> Iterable[tuple[fx.Node, str]]:
        """The operators, each with the last loop in front of it, the first ones with the first loop."""
        before = next(iter(self.loops.values()), "")
        for node in self.module.graph.nodes:
            before = self.loops.get(node, before)
            yield node, before

    def loop_of(self, node: fx.Node, is_for_users: bool, before: str) -> str:
        """The loop for which an operator runs: the first that uses its result, or the last that makes its operands; where no
        value tells, the last one in front of it.
        """
        used, made = self.used_by.get(node), self.made_by.get(node)
        user = None if used is None else self.loops[used]
        return (user or made if is_for_users else made or user) or before

    def early(self) -> tuple[int, int]:
        """How many reductions begin before the last loop does, and how many there are."""
        order = [node for node in self.module.graph.nodes if node in self.loops or _is_reduction(node)]
        last = max((i for i, node in enumerate(order) if node in self.loops), default=-1)
        return sum(node not in self.loops for node in order[:last]), len(order) - len(self.loops)


def _is_reduction(node: fx.Node) -> bool:
    sent = sent_by_node(node)
    return sent is not None and sent.kind == REDUCTIONS
