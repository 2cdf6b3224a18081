"""Decide which values of earlier loops a loop recomputes, and which are stored.

A value that was complete in an earlier loop is either recomputed from available values or stored for the full
sequence. A product that both loops need is not computed twice. The cheapest set to store is a minimum cut: the
fewest bytes on the paths from such products to the loop's own values.

    gate, up -> silu(gate) * up -> x + down(...) -> norm        stores x, not gate and up
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from streamfx.ir.facts import StorageClass
from streamfx.passes.partition.value_table import Access, Bytes, Table

BEFORE, HERE = "before", "here"
FOR_PAIRS = 1 << 20  # factor on the bytes of query-by-key values: they are stored only if no other cut exists


class Rematerialization:
    """The values that loop `number` of a region reads from earlier loops.

    `loop_indices` has the first loop that can compute each value, `products` the products that an earlier loop computes for
    itself. `sizes` is required if there is an earlier loop.
    """

    def __init__(
        self, number: int, table: Table, loop_indices: tuple[int, ...], sizes: Bytes | None, products: Collection[int]
    ) -> None:
        self.number, self.table, self.loop_indices, self.sizes, self.products = number, table, loop_indices, sizes, products

    def cut(self, outputs: Iterable[int], stored: Collection[int]) -> set[int]:
        """Return the values to store for a loop with these outputs; those in `stored` are stored anyway, at no cost."""
        if self.number == 0:
            return set()
        network = self._network(outputs, stored)
        if BEFORE not in network:
            return set()
        # Of all minimum cuts, take the one closest to the loop. Any algorithm finds it; this one is the fastest on
        # these graphs.
        _, (earlier_side, loop_side) = networkx.minimum_cut(network, BEFORE, HERE, flow_func=boykov_kolmogorov)
        return {
            value for value in self._storable_values(network) if (value, "in") in earlier_side and (value, "out") in loop_side
        }

    def must_be_stored(self, need: Access) -> bool:
        """Return whether the loop cannot recompute the needed rows for its own chunk."""
        return need.is_stored or (need.is_stored_before and self.loop_indices[need.operand] != self.number)

    def walk(self, outputs: Iterable[int], goes_on: Callable[[Access], bool]) -> Iterator[tuple[int, Access]]:
        """Yield each value computed for these outputs with each of its needs that a loop of the region computes, in
        reverse order; `goes_on` says whether the operand is computed, too.
        """
        todo, seen = list(outputs), set[int]()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for need in self.table[value].needs:
                if self.table[need.operand].is_in_loop:
                    yield value, need
                    if goes_on(need):
                        todo.append(need.operand)

    def _is_read_from_earlier_loop(self, need: Access) -> bool:
        """Return whether an operand is read from an earlier loop, unless a value computed from it is stored there."""
        is_computed_before = self.loop_indices[need.operand] != self.number and need.operand in self.products
        return self.must_be_stored(need) or is_computed_before

    def _network(self, outputs: Iterable[int], stored: Collection[int]) -> Any:
        """Build the flow network: capacities are bytes, and edges lead from each operand to its users."""
        network = networkx.DiGraph()
        network.add_node(HERE)
        for value, need in self.walk(outputs, lambda need: not self._is_read_from_earlier_loop(need)):
            operand = need.operand
            network.add_edge(self._out(operand), self._in(value), capacity=math.inf)
            if self.loop_indices[operand] != self.number:
                network.add_edge((operand, "in"), (operand, "out"), capacity=self._bytes(operand, stored))
            if self._is_read_from_earlier_loop(need):
                network.add_edge(BEFORE, self._in(operand), capacity=math.inf)
        network.remove_edges_from([(HERE, HERE)])
        return network

    def _in(self, value: int) -> Any:
        """Return a value's entry node in the flow network; values of this loop share one node."""
        return HERE if self.loop_indices[value] == self.number else (value, "in")

    def _out(self, value: int) -> Any:
        """Return a value's exit node in the flow network; values of this loop share one node."""
        return HERE if self.loop_indices[value] == self.number else (value, "out")

    def _bytes(self, value: int, stored: Collection[int]) -> int:
        """Return the bytes to store a value for this loop: 0 if it is stored anyway or a sum."""
        storage_class = self.table[value].storage_class
        if value in stored or storage_class is StorageClass.SUM:
            return 0
        assert self.sizes is not None
        size = self.sizes.shown[value]
        return size * FOR_PAIRS if storage_class is StorageClass.PAIR else size

    def _storable_values(self, network: Any) -> list[int]:
        """Return the values that the flow network may store."""
        return [node[0] for node in network if isinstance(node, tuple) and node[1] == "in"]
