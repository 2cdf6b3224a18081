"""In which loop does each value of a stage live?

A stage may need several loops, one after the other. A value belongs to the first loop in which all it needs is there:

* rows of a value of the same loop are there at once;
* keys [.., e) are there in a loop from left to right, where earlier chunks have left them in a buffer; cotangents of keys
  are complete in a loop from right to left once the chunk that holds them is reached;
* anything else (all keys, all rows, a finished sum) has to wait for the next loop.

Cheap values are computed again in each loop that needs them; products are stored.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx

from streamfx.ir.facts import Form, Role, Span
from streamfx.ir.joint import is_size, is_tensor, node_argument
from streamfx.ir.needs import Layout, Need
from streamfx.passes.linear import is_expensive


@dataclass
class LoopContent:
    """What one loop has to leave behind, and what it keeps in buffers."""

    stacked: set[fx.Node] = field(default_factory=set)
    summed: set[fx.Node] = field(default_factory=set)
    key_sums: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class Region:
    """The loops of one half of a stage; `level` says in which loop (or before which loop) each value is made."""

    nodes: tuple[fx.Node, ...]
    level: dict[fx.Node, int]
    loops: tuple[LoopContent, ...]
    reverse: bool


def is_loop_value(node: fx.Node, layout: Layout) -> bool:
    return layout.demand.form(node) not in (Form.SCALAR, Form.WHOLE)


def producer_of(node: fx.Node) -> fx.Node:
    """The operator that makes a value: a result of a tuple-valued operator belongs to that operator."""
    return node_argument(node) if node.target is operator.getitem else node


def operand_needs(node: fx.Node, layout: Layout) -> list[Need]:
    """What a value made in a loop needs; a `getitem` needs nothing but its operator."""
    return list(layout.needs(producer_of(node)))


def place(
    outputs: Iterable[fx.Node],
    available: Callable[[fx.Node], bool],
    layout: Layout,
    order: dict[fx.Node, int],
    reverse: bool,
) -> Region:
    """Distribute all that `outputs` need, down to `available` values, over loops."""
    nodes = _closure(outputs, available, order)
    level = _levels(nodes, available, layout, reverse)
    loops: dict[int, LoopContent] = defaultdict(LoopContent)
    placer = _Placer(layout, available, level, loops)
    for node in outputs:
        placer.want_outside(node)
    for node in nodes:
        if is_tensor(node) and not is_loop_value(node, layout):
            for operand in _tensor_inputs(node):
                placer.want_outside(operand)
    count = 1 + max((level[node] for node in nodes if is_tensor(node) and is_loop_value(node, layout)), default=-1)
    for number in range(count - 1, -1, -1):
        placer.fill(number)
    return Region(tuple(nodes), level, tuple(loops[i] for i in range(count)), reverse)


def _closure(outputs: Iterable[fx.Node], available: Callable[[fx.Node], bool], order: dict[fx.Node, int]) -> list[fx.Node]:
    """Values (not sizes) between `available` ones and the outputs, in program order."""
    found: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in found or is_size(node) or available(node):
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
        if "streamfx_draw" in node.meta:
            todo.append(node.meta["streamfx_draw"][0])
    return sorted(found, key=order.__getitem__)


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    return [source for source in producer_of(node).all_input_nodes if is_tensor(source)]


def _levels(nodes: list[fx.Node], available: Callable[[fx.Node], bool], layout: Layout, reverse: bool) -> dict[fx.Node, int]:
    level: dict[fx.Node, int] = {}
    for node in nodes:
        if not is_tensor(node):
            continue
        if is_loop_value(node, layout):
            waits = (_wait(need, level, available, layout, reverse) for need in operand_needs(node, layout))
        else:
            waits = (_wait_outside(operand, level, available, layout) for operand in _tensor_inputs(node))
        level[node] = max(waits, default=0)
    return level


def _wait_outside(operand: fx.Node, level: dict[fx.Node, int], available: Callable[[fx.Node], bool], layout: Layout) -> int:
    if available(operand):
        return 0
    return level[operand] + is_loop_value(operand, layout)


def _wait(need: Need, level: dict[fx.Node, int], available: Callable[[fx.Node], bool], layout: Layout, reverse: bool) -> int:
    """The first loop in which a need is met."""
    operand = need.operand
    if available(operand):
        return 0
    if not is_loop_value(operand, layout):
        return level[operand]
    return level[operand] + (not is_met_in_same_loop(need, layout, reverse))


def is_met_in_same_loop(need: Need, layout: Layout, reverse: bool) -> bool:
    """Whether the rows needed are already there when the chunk that makes the operand's rows is being computed."""
    form = layout.demand.form(need.operand)
    if form is Form.PAIR:
        return Role.WHOLE not in need.roles
    if form is Form.SUM or (need.roles != {Role.ROWS} and need.roles != {Role.KEYS}):
        return False
    if form is Form.KEYSUM:
        span = layout.span(producer_of(need.operand))
        return need.roles == {Role.ROWS} and need.selector is None and _is_seen(span, not reverse)
    return _is_seen(layout.distance(need.where[0][0], need.selector), reverse)


def _is_seen(span: Span, reverse: bool) -> bool:
    """Whether rows of the span belong to this chunk or to chunks that ran before it."""
    return (span.low is not None and span.low >= 0) if reverse else (span.high is not None and span.high <= 0)


class _Placer:
    def __init__(
        self,
        layout: Layout,
        available: Callable[[fx.Node], bool],
        level: dict[fx.Node, int],
        loops: dict[int, LoopContent],
    ) -> None:
        self.layout, self.available, self.level, self.loops = layout, available, level, loops
        self.computed_later: set[fx.Node] = set()

    def want_outside(self, node: fx.Node) -> None:
        """The whole value is needed between loops, or after them."""
        if self.available(node) or not is_tensor(node) or not is_loop_value(node, self.layout):
            return
        content = self.loops[self.level[node]]
        match self.layout.demand.form(node):
            case Form.SUM:
                content.summed.add(node)
            case Form.KEYSUM:
                content.key_sums.add(node)
            case _:
                content.stacked.add(node)

    def fill(self, number: int) -> None:
        """Find what loop `number` computes, and pass what it needs from earlier loops on to them."""
        content = self.loops[number]
        todo = list(content.stacked | content.summed | content.key_sums)
        seen: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.computed_later and is_expensive(node):
                content.stacked.add(node)  # a later loop takes the rows stored here
            for need in operand_needs(node, self.layout):
                operand = need.operand
                if self.available(operand) or not is_loop_value(operand, self.layout):
                    continue
                if self.computes_here(need, number):
                    todo.append(operand)
                else:
                    self.want_outside(operand)
        self.computed_later |= {node for node in seen if self.layout.demand.form(node) is Form.ROWS}

    def computes_here(self, need: Need, number: int) -> bool:
        """Whether loop `number` makes the operand itself; else it takes what an earlier loop has stored."""
        form = self.layout.demand.form(need.operand)
        if Role.WHOLE in need.roles or form is Form.SUM:
            return False
        if form is Form.PAIR:
            return True
        if form is Form.KEYSUM or need.selector is not None:
            return self.level[need.operand] == number
        return True
