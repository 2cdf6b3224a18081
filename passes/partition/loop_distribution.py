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
tables. In such functions a value is an integer, its index in the table. A *region* is all loops of a stage in one direction,
forward or backward; a *placement* is the assignment, with the values that each loop returns.
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
from streamfx.passes.partition.value_table import Access, Bytes, Table, bytes_of, is_loop_value, table_of, tensor_inputs
from streamfx.torch_private.graph_nodes import operands_of

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
    """Return the loops that compute `outputs`, and the loop of each of their ancestors.

    `available` returns True for values that exist before the loops; `layout` has the rows that each operator reads; `order`
    has the position of each node in the graph. Loops in `reverse` run from the last chunk to the first.
    """
    available = functools.cache(available)  # the graph does not change in the meantime
    outputs = list(outputs)
    nodes = _closure(outputs, available, order, layout)
    values = [node for node in nodes if is_tensor(node)]
    table = table_of(values, available, layout, reverse)
    placement = choose_placement(values, table, _requested_values(outputs, nodes, values, layout), layout)
    loops = tuple(LoopContent(*({values[i] for i in indices} for indices in content)) for content in placement.loops)
    return Region(tuple(nodes), dict(zip(values, placement.loop_indices, strict=True)), loops, reverse)


def choose_placement(
    values: Sequence[fx.Node], table: Table, requests: tuple[frozenset[int], frozenset[int]], layout: Layout
) -> RegionPlacement:
    """Return the loop of each value, and the values that each loop returns, so that loops store few bytes for each other.

    `table` describes `values`, in order. `requests`: the indices of the outputs, and of all values that must exist in full.
    """
    outputs, requested = requests
    early = earliest_loops(table)
    if loop_count(table, early) < 2:
        return choose_stored_values(table, requested, early, None)
    return cheapest_placement(table, outputs, requested, bytes_of(values, table, layout))


@functools.lru_cache(CACHE_SIZE)
def cheapest_placement(table: Table, outputs: frozenset[int], requested: frozenset[int], sizes: Bytes) -> RegionPlacement:
    """Return the placement that stores fewer bytes: all values as early as possible, or as late as possible.

    `outputs`, `requested`: the region's outputs, and all values that must exist in full, as table indices. `sizes`: bytes.
    """
    earliest, latest = earliest_loops(table), latest_loops(table)
    early_placement = choose_stored_values(table, requested, earliest, sizes)
    if latest == earliest:
        return early_placement
    return min(
        (early_placement, choose_stored_values(table, requested, latest, sizes)),
        key=lambda placement: _stored_bytes(placement, outputs, sizes),
    )


def _stored_bytes(placement: RegionPlacement, outputs: frozenset[int], sizes: Bytes) -> int:
    """Return the bytes of the rows that loops store for later loops, without the region's outputs, which are stored anyway."""
    stacked = frozenset[int]().union(*(content.stacked for content in placement.loops))
    return sum(sizes.full[value] for value in stacked - outputs)


@functools.lru_cache(CACHE_SIZE)
def choose_stored_values(
    table: Table, requested: frozenset[int], loop_indices: LoopIndices, sizes: Bytes | None
) -> RegionPlacement:
    """Choose the values that each loop stores or returns, given the loop of each value (`loop_indices`).

    `requested` values must exist in full. `sizes`: bytes per value, or None if there is only one loop. With several loops,
    choose twice: the second time, a product that two loops compute is stored by the earlier one.
    """
    count = loop_count(table, loop_indices)
    chooser = _StorageChooser(table, loop_indices, requested, sizes)
    chooser.choose_for_all(count)
    if count > 1:
        chooser = _StorageChooser(table, loop_indices, requested, sizes, chooser.computed)
        chooser.choose_for_all(count)
    return RegionPlacement(loop_indices, tuple(chooser.content(loop_index) for loop_index in range(count)))


def loop_count(table: Table, loop_indices: LoopIndices) -> int:
    """Return the number of loops of a region, given the loop of each value; 0 if no value is computed in a loop."""
    return 1 + max((loop_index for loop_index, value in zip(loop_indices, table, strict=True) if value.is_in_loop), default=-1)


def _closure(
    outputs: Iterable[fx.Node], available: Callable[[fx.Node], bool], order: dict[fx.Node, int], layout: Layout
) -> list[fx.Node]:
    """Return the outputs and their ancestors, except `available` values and sizes (SymInts), in graph order.

    For random draws in loops, this includes the node of the step's seed (`DRAW` metadata). Draws between loops need no seed:
    they stay as traced, as eager draws them.
    """
    closure: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in closure or is_size(node) or available(node):
            continue
        closure.add(node)
        todo.extend(operands_of(node))
        if DRAW in node.meta and is_loop_value(node, layout):
            todo.append(node.meta[DRAW][0])
    return sorted(closure, key=order.__getitem__)


def _requested_values(
    outputs: Iterable[fx.Node], nodes: Iterable[fx.Node], values: Sequence[fx.Node], layout: Layout
) -> tuple[frozenset[int], frozenset[int]]:
    """Return two sets of indices into `values`: the outputs; and all values that must exist in full.

    The latter are the outputs, and values that operators between loops read. `nodes` are the region's nodes.
    """
    table_index = {node: index for index, node in enumerate(values)}
    read_between_loops = [
        source for node in nodes if is_tensor(node) and not is_loop_value(node, layout) for source in tensor_inputs(node)
    ]
    requested_outputs = frozenset(table_index[node] for node in outputs if node in table_index)
    return requested_outputs, requested_outputs.union(table_index[node] for node in read_between_loops if node in table_index)


@functools.lru_cache(CACHE_SIZE)
def earliest_loops(table: Table) -> LoopIndices:
    """Return, for each value of the table, the index of the first loop in which all its operands are ready.

    A value between loops (not `is_in_loop`) gets the index of the loop before which it is computed.
    """
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
    """Return, for each value of the table, the index of the last loop in which it is early enough for all its uses.

    A value between loops gets the index of the loop before which it is computed. There are as many loops as for
    `earliest_loops`.
    """
    last_loop = max(
        (loop_index for loop_index, value in zip(earliest_loops(table), table, strict=True) if value.is_in_loop), default=0
    )
    latest = [last_loop if value.is_in_loop else last_loop + 1 for value in table]
    for index in range(len(table) - 1, -1, -1):
        value = table[index]
        for need in value.needs:
            latest[need.operand] = min(latest[need.operand], latest[index] - (not need.in_same_loop))
        for source in value.sources:
            latest[source] = min(latest[source], latest[index] - table[source].is_in_loop)
    for index, value in enumerate(table):  # all results of an operator are computed in the same loop
        if value.siblings:
            latest[index] = min(latest[sibling] for sibling in value.siblings)
    return tuple(latest)


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
        """Record that `requested` values must exist in full; `sizes` (bytes) is required if there are several loops."""
        self.table, self.loop_indices, self.sizes, self.computed_by_loop = table, loop_indices, sizes, computed_by_loop or {}
        self.stacked: dict[int, set[int]] = defaultdict(set)
        self.summed: dict[int, set[int]] = defaultdict(set)
        self.key_sums: dict[int, set[int]] = defaultdict(set)
        self.computed: dict[int, set[int]] = {}
        for value in requested:
            self.request_in_full(value)

    def content(self, loop_index: int) -> ContentPlacement:
        """Return the values that a loop returns: stacked rows, sums over chunks, sums per key. Call `choose_for_all` before."""
        return ContentPlacement(*(frozenset(returned[loop_index]) for returned in (self.stacked, self.summed, self.key_sums)))

    def choose_for_all(self, count: int) -> None:
        """Choose for all `count` loops, from the last to the first, because a loop requests values from earlier ones."""
        for loop_index in range(count - 1, -1, -1):
            self.choose_for_loop(loop_index)

    def _is_worth_storing(self, value: int) -> bool:
        """Return whether a later loop reads a value that an earlier one computes, instead of computing it twice.

        It does for results of expensive operators (matmuls) that have rows of the sequence.
        """
        return self.table[value].is_expensive and self.table[value].storage_class is StorageClass.ROWS

    def request_in_full(self, value: int) -> None:
        """Record that the loop of a value returns it in full; nothing for a value between loops, which exists in full."""
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
        """Choose the values that a loop computes (`self.computed`), and request the others that it reads from earlier loops."""
        outputs = self.stacked[loop_index] | self.summed[loop_index] | self.key_sums[loop_index]
        computed_before = (value for earlier in range(loop_index) for value in self.computed_by_loop.get(earlier, ()))
        products = {value for value in computed_before if self._is_worth_storing(value)}
        rematerialization = Rematerialization(loop_index, self.table, self.loop_indices, self.sizes, products)
        stored = rematerialization.values_to_store(outputs, set().union(*self.stacked.values(), *self.key_sums.values()))
        computed = set(outputs)

        def is_computed_here(need: Access) -> bool:
            """Return whether this loop computes the operand itself."""
            return need.operand not in stored and not rematerialization.must_be_stored(need)

        for _, need in rematerialization.walk(outputs, is_computed_here):
            if is_computed_here(need):
                computed.add(need.operand)
            else:
                self.request_in_full(need.operand)
        self.computed[loop_index] = computed
