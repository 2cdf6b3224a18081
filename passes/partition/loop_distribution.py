"""Assign each value of a stage to one of the stage's loops.

A stage may need several loops, one after the other. A value is assigned to the first loop in which all its operands
are ready:

* the chunk's own rows of a value are ready in the same loop;
* key positions [.., e) are ready in the same loop if it runs in forward order: earlier chunks have stored them in a buffer.
  The cotangents of a chunk's keys are complete in a loop in reverse order when it reaches that chunk;
* all keys, all rows and complete sums are ready in the next loop.

Or each value is assigned to the last loop that is early enough for its uses, if that stores fewer bytes between loops.

Values that a later loop reads from an earlier one are stored or recomputed (`rematerialization.py`).

The assignment depends only on a table of numbers (`value_table.py`), so it is computed once for all layers with equal
tables.
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

CACHE_SIZE = 256  # distinct regions whose placement is cached

LoopIndices: TypeAlias = "tuple[int, ...]"


@dataclass
class LoopContent:
    """The values that one loop returns: stacked rows, sums over chunks, and sums over chunks for each key position."""

    stacked: set[fx.Node] = field(default_factory=set)
    summed: set[fx.Node] = field(default_factory=set)
    key_sums: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class Region:
    """The loops of a stage in one direction; `loop_index` is the index of the loop in (or before) which a value is ready."""

    nodes: tuple[fx.Node, ...]
    loop_index: dict[fx.Node, int]
    loops: tuple[LoopContent, ...]
    reverse: bool


class ContentPlacement(NamedTuple):
    """A `LoopContent` with indices into the table in place of nodes."""

    stacked: frozenset[int]
    summed: frozenset[int]
    key_sums: frozenset[int]


class RegionPlacement(NamedTuple):
    """A `Region` with indices into the table in place of nodes."""

    loop_indices: LoopIndices
    loops: tuple[ContentPlacement, ...]


def distribute_over_loops(
    outputs: Iterable[fx.Node],
    available: Callable[[fx.Node], bool],
    layout: Layout,
    order: dict[fx.Node, int],
    reverse: bool,
) -> Region:
    """Distribute the ancestors of `outputs` over loops; values for which `available` is true exist already."""
    available = functools.cache(available)  # the graph does not change in the meantime
    outputs = list(outputs)
    nodes = _closure(outputs, available, order, layout)
    values = [node for node in nodes if is_tensor(node)]
    placement = choose_placement(
        values, table_of(values, available, layout, reverse), _requested_values(outputs, nodes, values, layout), layout
    )
    loops = tuple(LoopContent(*({values[i] for i in indices} for indices in content)) for content in placement.loops)
    return Region(tuple(nodes), dict(zip(values, placement.loop_indices, strict=True)), loops, reverse)


def choose_placement(
    values: Sequence[fx.Node], table: Table, requests: tuple[frozenset[int], frozenset[int]], layout: Layout
) -> RegionPlacement:
    """Return the placement that stores the fewest bytes; `requests` is the result of `_requested_values`."""
    outputs, requested = requests
    early = earliest_loops(table)
    if loop_count(table, early) < 2:
        return choose_stored_values(table, requested, early, None)
    return cheapest_placement(table, outputs, requested, bytes_of(values, table, layout))


@functools.lru_cache(CACHE_SIZE)
def cheapest_placement(table: Table, outputs: frozenset[int], requested: frozenset[int], sizes: Bytes) -> RegionPlacement:
    """Return the placement that stores fewer bytes: all values as early as possible, or as late as possible."""
    earliest, latest = earliest_loops(table), latest_loops(table)
    early_placement = choose_stored_values(table, requested, earliest, sizes)
    if latest == earliest:
        return early_placement
    return min(
        (early_placement, choose_stored_values(table, requested, latest, sizes)),
        key=lambda placement: _stored_bytes(placement, outputs, sizes),
    )


def _stored_bytes(placement: RegionPlacement, outputs: frozenset[int], sizes: Bytes) -> int:
    """Return the bytes that loops stack for later loops, without the region's outputs."""
    return sum(sizes.full[i] for i in frozenset[int]().union(*(content.stacked for content in placement.loops)) - outputs)


@functools.lru_cache(CACHE_SIZE)
def choose_stored_values(
    table: Table, requested: frozenset[int], loop_indices: LoopIndices, sizes: Bytes | None
) -> RegionPlacement:
    """Choose the values that each loop stores, given the loop of each value; `sizes` is required if there are several loops."""
    count = loop_count(table, loop_indices)
    chooser = _StorageChooser(table, loop_indices, requested, sizes)
    chooser.choose_for_all(count)
    if count > 1:
        chooser = _StorageChooser(table, loop_indices, requested, sizes, chooser.computed)
        chooser.choose_for_all(count)
    return RegionPlacement(loop_indices, tuple(chooser.content(loop_index) for loop_index in range(count)))


def loop_count(table: Table, loop_indices: LoopIndices) -> int:
    """Return the number of loops of a region."""
    return 1 + max((loop_index for loop_index, value in zip(loop_indices, table, strict=True) if value.is_in_loop), default=-1)


def _closure(
    outputs: Iterable[fx.Node], available: Callable[[fx.Node], bool], order: dict[fx.Node, int], layout: Layout
) -> list[fx.Node]:
    """Return the values (not sizes) between `available` ones and the outputs, in program order.

    If a loop draws random numbers, this includes the step's seed. Draws between loops stay as traced, as eager
    draws them.
    """
    closure: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in closure or is_size(node) or available(node):
            continue
        closure.add(node)
        todo.extend(node.all_input_nodes)
        if DRAW in node.meta and is_loop_value(node, layout):
            todo.append(node.meta[DRAW][0])
    return sorted(closure, key=order.__getitem__)


def _requested_values(
    outputs: Iterable[fx.Node], nodes: Iterable[fx.Node], values: Sequence[fx.Node], layout: Layout
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the outputs, and the outputs with the values that operators between loops read, as indices of `values`."""
    index = {node: i for i, node in enumerate(values)}
    read_between_loops = [
        source for node in nodes if is_tensor(node) and not is_loop_value(node, layout) for source in tensor_inputs(node)
    ]
    requested_outputs = frozenset(index[node] for node in outputs if node in index)
    return requested_outputs, requested_outputs.union(index[node] for node in read_between_loops if node in index)


@functools.lru_cache(CACHE_SIZE)
def earliest_loops(table: Table) -> LoopIndices:
    """Return, for each value, the first loop in (or before) which all its operands are ready."""
    loop_indices: list[int] = []
    for value in table:
        if value.is_in_loop:  # an operator between loops waits for no further loop once its operands exist
            waits = [loop_indices[need.operand] + (not need.in_same_loop) for need in value.needs]
        else:
            waits = [loop_indices[source] + table[source].is_in_loop for source in value.sources]
        loop_indices.append(max(waits, default=0))
    return tuple(loop_indices)


@functools.lru_cache(CACHE_SIZE)
def latest_loops(table: Table) -> LoopIndices:
    """Return, for each value, the last loop in (or before) which it is early enough for all its uses."""
    last = max(
        (loop_index for loop_index, value in zip(earliest_loops(table), table, strict=True) if value.is_in_loop), default=0
    )
    late = [last if value.is_in_loop else last + 1 for value in table]
    for index in range(len(table) - 1, -1, -1):
        value = table[index]
        for need in value.needs:
            late[need.operand] = min(late[need.operand], late[index] - (not need.in_same_loop))
        for source in value.sources:
            late[source] = min(late[source], late[index] - table[source].is_in_loop)
    for index, value in enumerate(table):  # all results of an operator are computed in the same loop
        if value.siblings:
            late[index] = min(late[sibling] for sibling in value.siblings)
    return tuple(late)


class _StorageChooser:
    """Chooses, from the last loop to the first, which values a loop computes and which it reads from earlier loops.

    `stacked`, `summed`, `key_sums`: the values that each loop returns for later loops or as outputs.
    `computed_by_loop`: the values that each loop computes if products are not shared, from a first run of this class. A
    product that several loops compute there is then stored by the first one.
    """

    def __init__(
        self,
        table: Table,
        loop_indices: LoopIndices,
        requested: Iterable[int],
        sizes: Bytes | None,
        computed_by_loop: Mapping[int, set[int]] | None = None,
    ) -> None:
        """Request these values in full; `sizes` is required if there are several loops."""
        self.table, self.loop_indices, self.sizes, self.computed_by_loop = table, loop_indices, sizes, computed_by_loop or {}
        self.stacked: dict[int, set[int]] = defaultdict(set)
        self.summed: dict[int, set[int]] = defaultdict(set)
        self.key_sums: dict[int, set[int]] = defaultdict(set)
        self.computed: dict[int, set[int]] = {}
        for value in requested:
            self.request_in_full(value)

    def content(self, loop_index: int) -> ContentPlacement:
        """Return the values that a loop returns or accumulates."""
        return ContentPlacement(*(frozenset(returned[loop_index]) for returned in (self.stacked, self.summed, self.key_sums)))

    def choose_for_all(self, count: int) -> None:
        """Choose for all loops, from the last to the first."""
        for loop_index in range(count - 1, -1, -1):
            self.choose_for_loop(loop_index)

    def _is_stored_product(self, value: int) -> bool:
        """Return whether a value is the sequence-shaped result of an expensive operator."""
        return self.table[value].is_expensive and self.table[value].storage_class is StorageClass.ROWS

    def request_in_full(self, value: int) -> None:
        """Let the loop of a value return it in full. A value that no loop computes needs no loop."""
        if not self.table[value].is_in_loop:
            return
        match self.table[value].storage_class:
            case StorageClass.SUM:
                self.summed[self.loop_indices[value]].add(value)
            case StorageClass.KEYSUM:
                self.key_sums[self.loop_indices[value]].add(value)
            case _:
                self.stacked[self.loop_indices[value]].add(value)

    def choose_for_loop(self, loop_index: int) -> None:
        """Choose the values that a loop computes, and request the others from earlier loops."""
        outputs = self.stacked[loop_index] | self.summed[loop_index] | self.key_sums[loop_index]
        products = {
            value
            for earlier in range(loop_index)
            for value in self.computed_by_loop.get(earlier, ())
            if self._is_stored_product(value)
        }
        rematerialization = Rematerialization(loop_index, self.table, self.loop_indices, self.sizes, products)
        stored = rematerialization.values_to_store(outputs, set().union(*self.stacked.values(), *self.key_sums.values()))
        computed = set(outputs)
        for _, need in rematerialization.walk(
            outputs, lambda need: need.operand not in stored and not rematerialization.must_be_stored(need)
        ):
            if need.operand not in stored and not rematerialization.must_be_stored(need):
                computed.add(need.operand)
            else:
                self.request_in_full(need.operand)
        self.computed[loop_index] = computed
