"""Decide which values of earlier loops a loop recomputes, and which are stored.

A value that an earlier loop can compute is either stored there, for the full sequence, or recomputed by this loop. A
product (matmul) that both loops need is not computed twice. So the stored values must separate these products from the values
of this loop: a minimum cut finds the ones with the fewest bytes.

    gate, up -> silu(gate) * up -> x + down(...) -> norm        stores x, not gate and up

A *region* is all loops of a stage in one direction. A value is an integer here: its index in the region's table of values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from streamfx.ir.facts import StorageClass
from streamfx.passes.partition.value_table import Access, Bytes, Table

EARLIER_LOOPS, THIS_LOOP = "before", "here"  # source and sink of the flow network
PAIR_COST_FACTOR = 1 << 20  # on the bytes of query-by-key values: they are stored only if there is no other minimum cut


class Rematerialization:
    """Selects the values that one loop of a region (`loop_index`) reads from earlier loops.

    `table`: an entry for each value. `loop_indices`: the loop that computes each value.
    `products`: the products that earlier loops compute for their own values.
    `sizes`: the bytes of each value; required if there is an earlier loop.
    """

    def __init__(
        self, loop_index: int, table: Table, loop_indices: tuple[int, ...], sizes: Bytes | None, products: Collection[int]
    ) -> None:
        self.loop_index = loop_index
        self.table = table
        self.loop_indices = loop_indices
        self.sizes = sizes
        self.products = products

    def values_to_store(self, outputs: Iterable[int], stored: Collection[int]) -> set[int]:
        """Return the values that earlier loops must store for this loop, which computes `outputs`: those with the fewest bytes.

        Values in `stored` are stored in any case, so they cost nothing. An empty set if this loop reads no earlier values.
        """
        if self.loop_index == 0:
            return set()
        network = self._network(outputs, stored)
        if EARLIER_LOOPS not in network:
            return set()
        # Of all minimum cuts, networkx returns the one closest to the loop. The choice of algorithm affects the speed only.
        _, (earlier_side, loop_side) = networkx.minimum_cut(network, EARLIER_LOOPS, THIS_LOOP, flow_func=boykov_kolmogorov)
        edges = network.edges(data="capacity")
        return {start[0] for start, end, size in edges if size is not None and start in earlier_side and end in loop_side}

    def must_be_stored(self, need: Access) -> bool:
        """Return whether an operand must be stored in full, because this loop cannot recompute the rows that a chunk reads."""
        return need.is_stored or (need.is_stored_before and self.loop_indices[need.operand] != self.loop_index)

    def walk(self, outputs: Iterable[int], descends: Callable[[Access], bool]) -> Iterator[tuple[int, Access]]:
        """Yield (value, operand) for each value that this loop computes, and each operand of it that some loop computes.

        These values are the outputs, and each operand for which `descends` returns True, transitively.
        """
        todo = list(outputs)
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for need in self.table[value].needs:
                if self.table[need.operand].is_in_loop:
                    yield value, need
                    if descends(need):
                        todo.append(need.operand)

    def _is_read_from_earlier_loop(self, need: Access) -> bool:
        """Return whether this loop should not recompute an operand: it is a product of an earlier loop, or must be stored."""
        is_computed_before = self.loop_indices[need.operand] != self.loop_index and need.operand in self.products
        return self.must_be_stored(need) or is_computed_before

    def _network(self, outputs: Iterable[int], stored: Collection[int]) -> Any:
        """Build the flow network whose minimum cut, between `EARLIER_LOOPS` and `THIS_LOOP`, is the values to store.

        Edges lead from each operand to its users, and have no capacity limit. Each value of an earlier loop is two vertices; the
        edge from "in" to "out" has the bytes to store it as capacity. All values of this loop are the vertex `THIS_LOOP`.
        """
        network = networkx.DiGraph()
        network.add_node(THIS_LOOP)
        for value, need in self.walk(outputs, lambda need: not self._is_read_from_earlier_loop(need)):
            operand = need.operand
            network.add_edge(self._vertex(operand, "out"), self._vertex(value, "in"))
            if self.loop_indices[operand] != self.loop_index:
                network.add_edge((operand, "in"), (operand, "out"), capacity=self._bytes(operand, stored))
            if self._is_read_from_earlier_loop(need):
                network.add_edge(EARLIER_LOOPS, self._vertex(operand, "in"))
        network.remove_edges_from([(THIS_LOOP, THIS_LOOP)])
        return network

    def _vertex(self, value: int, side: str) -> Any:
        """Return a value's vertex in the flow network, where operands enter ("in") or users leave ("out")."""
        return THIS_LOOP if self.loop_indices[value] == self.loop_index else (value, side)

    def _bytes(self, value: int, stored: Collection[int]) -> int:
        """Return the bytes to store a value for this loop: 0 for sums, and for values that are stored anyway."""
        storage_class = self.table[value].storage_class
        if value in stored or storage_class is StorageClass.SUM:
            return 0
        assert self.sizes is not None
        size = self.sizes.traced[value]
        return size * PAIR_COST_FACTOR if storage_class is StorageClass.PAIR else size
