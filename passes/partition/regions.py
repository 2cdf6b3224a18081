"""In which loop does each value of a stage live?

A stage may need several loops, one after the other. A value belongs to the first loop in which all it needs is there:

* rows of a value of the same loop are there at once;
* keys [.., e) are there in a loop from left to right, where earlier chunks have left them in a buffer; cotangents of keys
  are complete in a loop from right to left once the chunk that holds them is reached;
* anything else (all keys, all rows, a finished sum) has to wait for the next loop.

Or it belongs to the last loop in which it is still in time for those that use it, where that leaves less to be stored in between.

What a later loop needs of an earlier one is stored, or computed again: `rematerialization.py`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from streamfx.ir.facts import Form, Role
from streamfx.ir.joint import is_size, is_tensor
from streamfx.ir.needs import Layout, Need
from streamfx.ir.sizes import numeric, product
from streamfx.ir.span import Span
from streamfx.passes.operators.traits import is_expensive, producer_of
from streamfx.passes.partition.rematerialization import Rematerialization, operand_needs


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


def place(
    outputs: Iterable[fx.Node],
    available: Callable[[fx.Node], bool],
    layout: Layout,
    order: dict[fx.Node, int],
    reverse: bool,
) -> Region:
    """Distribute all that `outputs` need, down to `available` values, over loops."""
    available = functools.cache(available)  # nothing is made in between
    outputs, nodes = list(outputs), _closure(outputs, available, order)
    early = _levels(nodes, available, layout, reverse)
    first = _filled(outputs, available, layout, nodes, early, reverse)
    if len(first.loops) < 2:
        return first
    late = _latest(nodes, early, available, layout, reverse)
    if late == early:
        return first
    last = _filled(outputs, available, layout, nodes, late, reverse)
    return min((first, last), key=lambda region: _stored(region, set(outputs), layout))


def _stored(region: Region, wanted: set[fx.Node], layout: Layout) -> int:
    """Bytes that loops leave for later loops."""
    left = {node for content in region.loops for node in content.stacked} - wanted
    return sum(numeric(product(layout.full_shape(node))) * node.meta["val"].element_size() for node in left)


def _filled(
    outputs: list[fx.Node],
    available: Callable[[fx.Node], bool],
    layout: Layout,
    nodes: list[fx.Node],
    level: dict[fx.Node, int],
    reverse: bool,
) -> Region:
    """The region in which each value is made at its level."""
    wanted = list(outputs)
    for node in nodes:
        if is_tensor(node) and not is_loop_value(node, layout):
            wanted += _tensor_inputs(node)
    count = 1 + max((level[node] for node in nodes if is_tensor(node) and is_loop_value(node, layout)), default=-1)
    placer = _Placer(layout, available, level, wanted)
    placer.fill_all(count)
    if count > 1:
        placer = _Placer(layout, available, level, wanted, placer.computed)
        placer.fill_all(count)
    return Region(tuple(nodes), level, tuple(placer.loops[i] for i in range(count)), reverse)


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


def _latest(
    nodes: list[fx.Node], early: dict[fx.Node, int], available: Callable[[fx.Node], bool], layout: Layout, reverse: bool
) -> dict[fx.Node, int]:
    """The last loop in which (or before which) each value is in time for all that use it."""
    last = max((early[node] for node in early if is_loop_value(node, layout)), default=0)
    late = {node: last if is_loop_value(node, layout) else last + 1 for node in early}
    for node in reversed(nodes):
        if node not in early:
            continue
        if is_loop_value(node, layout):
            for need in operand_needs(node, layout):
                if need.operand in late and not available(need.operand):
                    wait = is_loop_value(need.operand, layout) and not is_met_in_same_loop(need, layout, reverse)
                    late[need.operand] = min(late[need.operand], late[node] - wait)
        else:
            for operand in _tensor_inputs(node):
                if operand in late:
                    late[operand] = min(late[operand], late[node] - is_loop_value(operand, layout))
    for node in nodes:  # the parts of a tuple are made where their operator is
        if node in late and producer_of(node) is not node and is_loop_value(node, layout):
            siblings = [user for user in producer_of(node).users if user in late]
            late[node] = min(late[sibling] for sibling in siblings)
    return late


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
    """Fills loops from the last to the first.

    `before` has what each would compute if all of them computed all they need: a product in several of these is made once.
    """

    def __init__(
        self,
        layout: Layout,
        available: Callable[[fx.Node], bool],
        level: dict[fx.Node, int],
        wanted: Iterable[fx.Node],
        before: Mapping[int, set[fx.Node]] | None = None,
    ) -> None:
        self.layout, self.available, self.level, self.before = layout, available, level, before or {}
        self.loops: dict[int, LoopContent] = defaultdict(LoopContent)
        self.computed: dict[int, set[fx.Node]] = {}
        for node in wanted:
            self.want_outside(node)

    def fill_all(self, count: int) -> None:
        for number in range(count - 1, -1, -1):
            self.fill(number)

    def is_there(self, node: fx.Node) -> bool:
        """Whether no loop of the region makes a value."""
        return self.available(node) or not is_tensor(node) or not is_loop_value(node, self.layout)

    def _is_stored_product(self, node: fx.Node) -> bool:
        return is_expensive(node) and self.layout.demand.form(node) is Form.ROWS

    def want_outside(self, node: fx.Node) -> None:
        """The whole value is needed between loops, or after them."""
        if self.is_there(node):
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
        outputs = content.stacked | content.summed | content.key_sums
        made = {node for earlier in range(number) for node in self.before.get(earlier, ()) if self._is_stored_product(node)}
        split = Rematerialization(number, self.level, self.is_there, self.layout, made)
        stored = {node for loop in self.loops.values() for node in loop.stacked | loop.key_sums}
        taken = split.cut(outputs, stored)

        def is_computed(need: Need) -> bool:
            return need.operand not in taken and not split.must_be_stored(need)

        computed = set(outputs)
        for _, need in split.walk(outputs, is_computed):
            if is_computed(need):
                computed.add(need.operand)
            else:
                self.want_outside(need.operand)
        self.computed[number] = computed
