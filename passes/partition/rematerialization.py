"""What does a loop take from the loops before it, and what does it compute again?

Values that were complete in an earlier loop are computed again from what is at hand, or stored there with all rows. A product
that both loops need is not computed twice. Between these the cheapest set to store is a minimum cut: of what leads from such
products to the loop's own values, the fewest bytes.

    gate, up -> silu(gate) * up -> x + down(...) -> norm        stores x, not gate and up
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import networkx
from torch import fx

from streamfx.ir.facts import Form, Role
from streamfx.ir.joint import shape_of_node
from streamfx.ir.needs import Layout, Need
from streamfx.ir.sizes import numeric, product
from streamfx.passes.operators.traits import producer_of

BEFORE, HERE = "before", "here"
FOR_PAIRS = 1 << 20  # how much dearer bytes of rows times keys are: they are stored where nothing else is possible


def operand_needs(node: fx.Node, layout: Layout) -> tuple[Need, ...]:
    """What a value made in a loop needs; a `getitem` needs nothing but its operator."""
    return layout.needs(producer_of(node))


class Rematerialization:
    """The values that loop `number` of a region takes from earlier ones.

    `level` says in which loop a value can first be made, `made` has the products that an earlier loop makes for itself.
    """

    def __init__(
        self,
        number: int,
        level: Mapping[fx.Node, int],
        is_there: Callable[[fx.Node], bool],
        layout: Layout,
        made: Collection[fx.Node],
    ) -> None:
        self.number, self.level, self.is_there, self.layout, self.made = number, level, is_there, layout, made

    def cut(self, outputs: Iterable[fx.Node], stored: Iterable[fx.Node]) -> set[fx.Node]:
        """What to store for a loop with these outputs; values in `stored` are, whatever this loop does."""
        if self.number == 0:
            return set()
        network = self._network(outputs, set(stored))
        if BEFORE not in network:
            return set()
        _, (far, near) = networkx.minimum_cut(network, BEFORE, HERE)  # of all minimum cuts the one nearest to the loop
        return {node for node in self._cuttable(network) if (node, "in") in far and (node, "out") in near}

    def must_be_stored(self, need: Need) -> bool:
        """Whether the rows that are needed are not those that a loop could make again for its own chunk."""
        form = self.layout.demand.form(need.operand)
        if form is Form.PAIR:
            return Role.WHOLE in need.roles
        if Role.WHOLE in need.roles or form is Form.SUM:
            return True
        return self.level[need.operand] != self.number and (form is Form.KEYSUM or need.selector is not None)

    def walk(self, outputs: Iterable[fx.Node], goes_on: Callable[[Need], bool]) -> Iterator[tuple[fx.Node, Need]]:
        """Each value that is computed for these outputs with each of its needs that a loop of the region meets, from the outputs
        back; `goes_on` says whether the operand is computed, too.
        """
        todo, seen = list(outputs), set[fx.Node]()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for need in operand_needs(node, self.layout):
                if not self.is_there(need.operand):
                    yield node, need
                    if goes_on(need):
                        todo.append(need.operand)

    def _is_given(self, need: Need) -> bool:
        """Whether an operand comes from an earlier loop in any case, unless what is made of it is stored there."""
        is_made_before = self.level[need.operand] != self.number and need.operand in self.made
        return self.must_be_stored(need) or is_made_before

    def _network(self, outputs: Iterable[fx.Node], stored: set[fx.Node]) -> Any:
        """Capacities are bytes; an edge leads from each operand to what is made of it."""
        network = networkx.DiGraph()
        network.add_node(HERE)
        for node, need in self.walk(outputs, lambda need: not self._is_given(need)):
            operand = need.operand
            network.add_edge(self._out(operand), self._in(node), capacity=math.inf)
            if self.level[operand] != self.number:
                network.add_edge((operand, "in"), (operand, "out"), capacity=self._bytes(operand, stored))
            if self._is_given(need):
                network.add_edge(BEFORE, self._in(operand), capacity=math.inf)
        network.remove_edges_from([(HERE, HERE)])
        return network

    def _in(self, node: fx.Node) -> Any:
        return HERE if self.level[node] == self.number else (node, "in")

    def _out(self, node: fx.Node) -> Any:
        return HERE if self.level[node] == self.number else (node, "out")

    def _bytes(self, node: fx.Node, stored: set[fx.Node]) -> int:
        form = self.layout.demand.form(node)
        if node in stored or form is Form.SUM:
            return 0
        size = numeric(product(shape_of_node(node))) * node.meta["val"].element_size()
        return size * FOR_PAIRS if form is Form.PAIR else size

    def _cuttable(self, network: Any) -> list[fx.Node]:
        return [node[0] for node in network if isinstance(node, tuple) and node[1] == "in"]
