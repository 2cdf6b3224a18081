"""In which loop does each value of a stage live?

A stage may need several loops, one after the other. A value belongs to the first loop in which all it needs is there:

* rows of a value of the same loop are there at once;
* keys [.., e) are there in a loop from left to right, where earlier chunks have left them in a buffer; cotangents of keys
  are complete in a loop from right to left once the chunk that holds them is reached;
* anything else (all keys, all rows, a finished sum) has to wait for the next loop.

Or it belongs to the last loop in which it is still in time for those that use it, where that leaves less to be stored in between.

What a later loop needs of an earlier one is stored, or computed again: `rematerialization.py`.

All of it follows from a table of numbers (`values.py`), and is found once where tables are equal: for all layers that are alike.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import fx

from streamfx.ir.access import Layout
from streamfx.ir.facts import StorageClass
from streamfx.ir.joint import is_size, is_tensor
from streamfx.node_meta import DRAW
from streamfx.passes.partition.rematerialization import Rematerialization
from streamfx.passes.partition.value_table import Bytes, Table, bytes_of, is_loop_value, table_of, tensor_inputs

KNOWN = 256  # so many regions that have nothing in common are remembered

Levels: TypeAlias = "tuple[int, ...]"


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


class ContentPlacement(NamedTuple):
    """A `LoopContent` in numbers."""

    stacked: frozenset[int]
    summed: frozenset[int]
    key_sums: frozenset[int]


class RegionPlacement(NamedTuple):
    """A `Region` in numbers."""

    levels: Levels
    loops: tuple[ContentPlacement, ...]


def place(
    outputs: Iterable[fx.Node],
    available: Callable[[fx.Node], bool],
    layout: Layout,
    order: dict[fx.Node, int],
    reverse: bool,
) -> Region:
    """Distribute all that `outputs` need, down to `available` values, over loops."""
    available = functools.cache(available)  # nothing is made in between
    outputs = list(outputs)
    nodes = _closure(outputs, available, order, layout)
    values = [node for node in nodes if is_tensor(node)]
    placed = placed_values(
        values, table_of(values, available, layout, reverse), _asked_for(outputs, nodes, values, layout), layout
    )
    loops = tuple(LoopContent(*({values[i] for i in numbers} for numbers in content)) for content in placed.loops)
    return Region(tuple(nodes), dict(zip(values, placed.levels, strict=True)), loops, reverse)


def placed_values(
    values: Sequence[fx.Node], table: Table, asked: tuple[frozenset[int], frozenset[int]], layout: Layout
) -> RegionPlacement:
    """What each loop makes; where there is a choice, of values in few bytes."""
    outputs, wanted = asked
    early = levels_of(table)
    if loops_of(table, early) < 2:
        return filled(table, wanted, early, None)
    return best_placed(table, outputs, wanted, bytes_of(values, table, layout))


@functools.lru_cache(KNOWN)
def best_placed(table: Table, outputs: frozenset[int], wanted: frozenset[int], sizes: Bytes) -> RegionPlacement:
    """The region that stores less, of those that make each value as early and as late as possible."""
    early, late = levels_of(table), latest_levels(table)
    first = filled(table, wanted, early, sizes)
    if late == early:
        return first
    return min((first, filled(table, wanted, late, sizes)), key=lambda placed: _stored(placed, outputs, sizes))


def _stored(placed: RegionPlacement, outputs: frozenset[int], sizes: Bytes) -> int:
    """Bytes that loops leave for later loops."""
    return sum(sizes.stored[i] for i in frozenset[int]().union(*(content.stacked for content in placed.loops)) - outputs)


@functools.lru_cache(KNOWN)
def filled(table: Table, wanted: frozenset[int], levels: Levels, sizes: Bytes | None) -> RegionPlacement:
    """The region in which each value is made at its level. Bytes are asked for where there are several loops."""
    count = loops_of(table, levels)
    placer = _Placer(table, levels, wanted, sizes)
    placer.fill_all(count)
    if count > 1:
        placer = _Placer(table, levels, wanted, sizes, placer.computed)
        placer.fill_all(count)
    return RegionPlacement(levels, tuple(placer.content(number) for number in range(count)))


def loops_of(table: Table, levels: Levels) -> int:
    return 1 + max((level for level, value in zip(levels, table, strict=True) if value.is_in_loop), default=-1)


def _closure(
    outputs: Iterable[fx.Node], available: Callable[[fx.Node], bool], order: dict[fx.Node, int], layout: Layout
) -> list[fx.Node]:
    """Values (not sizes) between `available` ones and the outputs, in program order.

    The step's seed is one where a loop draws. What is drawn between loops is drawn as it stood, as eager draws it.
    """
    found: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in found or is_size(node) or available(node):
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
        if DRAW in node.meta and is_loop_value(node, layout):
            todo.append(node.meta[DRAW][0])
    return sorted(found, key=order.__getitem__)


def _asked_for(
    outputs: Iterable[fx.Node], nodes: Iterable[fx.Node], values: Sequence[fx.Node], layout: Layout
) -> tuple[frozenset[int], frozenset[int]]:
    """The outputs, and with them what is needed whole between loops; not what is there anyway."""
    numbers = {node: i for i, node in enumerate(values)}
    between = [source for node in nodes if is_tensor(node) and not is_loop_value(node, layout) for source in tensor_inputs(node)]
    own = frozenset(numbers[node] for node in outputs if node in numbers)
    return own, own.union(numbers[node] for node in between if node in numbers)


@functools.lru_cache(KNOWN)
def levels_of(table: Table) -> Levels:
    """The first loop in which (or before which) all that a value needs is there."""
    levels: list[int] = []
    for value in table:
        if value.is_in_loop:  # what is made between loops waits for no loop, once it is made
            waits = [levels[need.operand] + (not need.in_same_loop) for need in value.needs]
        else:
            waits = [levels[source] + table[source].is_in_loop for source in value.sources]
        levels.append(max(waits, default=0))
    return tuple(levels)


@functools.lru_cache(KNOWN)
def latest_levels(table: Table) -> Levels:
    """The last loop in which (or before which) each value is in time for all that use it."""
    last = max((level for level, value in zip(levels_of(table), table, strict=True) if value.is_in_loop), default=0)
    late = [last if value.is_in_loop else last + 1 for value in table]
    for number in range(len(table) - 1, -1, -1):
        value = table[number]
        for need in value.needs:
            late[need.operand] = min(late[need.operand], late[number] - (not need.in_same_loop))
        for source in value.sources:
            late[source] = min(late[source], late[number] - table[source].is_in_loop)
    for number, value in enumerate(table):  # the parts of a tuple are made where their operator is
        if value.siblings:
            late[number] = min(late[sibling] for sibling in value.siblings)
    return tuple(late)


class _Placer:
    """Fills loops from the last to the first.

    `before` has what each would compute if all of them computed all they need: a product in several of these is made once.
    """

    def __init__(
        self,
        table: Table,
        levels: Levels,
        wanted: Iterable[int],
        sizes: Bytes | None,
        before: Mapping[int, set[int]] | None = None,
    ) -> None:
        self.table, self.levels, self.sizes, self.before = table, levels, sizes, before or {}
        self.stacked: dict[int, set[int]] = defaultdict(set)
        self.summed: dict[int, set[int]] = defaultdict(set)
        self.key_sums: dict[int, set[int]] = defaultdict(set)
        self.computed: dict[int, set[int]] = {}
        for value in wanted:
            self.want_outside(value)

    def content(self, number: int) -> ContentPlacement:
        """What a loop leaves, and what it keeps in buffers."""
        return ContentPlacement(*(frozenset(kept[number]) for kept in (self.stacked, self.summed, self.key_sums)))

    def fill_all(self, count: int) -> None:
        for number in range(count - 1, -1, -1):
            self.fill(number)

    def _is_stored_product(self, value: int) -> bool:
        return self.table[value].is_expensive and self.table[value].form is StorageClass.ROWS

    def want_outside(self, value: int) -> None:
        """The whole value is needed between loops, or after them; it is there where no loop makes it."""
        if not self.table[value].is_in_loop:
            return
        match self.table[value].form:
            case StorageClass.SUM:
                self.summed[self.levels[value]].add(value)
            case StorageClass.KEYSUM:
                self.key_sums[self.levels[value]].add(value)
            case _:
                self.stacked[self.levels[value]].add(value)

    def fill(self, number: int) -> None:
        """Find what loop `number` computes, and pass what it needs from earlier loops on to them."""
        outputs = self.stacked[number] | self.summed[number] | self.key_sums[number]
        made = {value for earlier in range(number) for value in self.before.get(earlier, ()) if self._is_stored_product(value)}
        split = Rematerialization(number, self.table, self.levels, self.sizes, made)
        taken = split.cut(outputs, set().union(*self.stacked.values(), *self.key_sums.values()))
        computed = set(outputs)
        for _, need in split.walk(outputs, lambda need: need.operand not in taken and not split.must_be_stored(need)):
            if need.operand not in taken and not split.must_be_stored(need):
                computed.add(need.operand)
            else:
                self.want_outside(need.operand)
        self.computed[number] = computed
