"""Find a last stage whose gradient can be computed together with the loss.

The cut with the fewest live bytes may come after the head (its results have one number per token), or before trained layers.
Then the head shares a stage with attention or trained layers. This module looks for another last stage: it contains the last
products (matmuls) on the path from trained values to the loss, called *heads*, and all their descendants, but no attention
and no trained weight. A minimum cut selects which of their ancestors it contains.

    attention, mlp | norm, head, log p [b t] -> sums [b], loss
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

import networkx
from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import ancestors, descendants, is_tensor, trained_values
from streamfx.node_meta import VALUE
from streamfx.passes.ops.traits import is_product, producer_of
from streamfx.passes.partition.stages import PROHIBITIVE_COST, stages_with_last
from streamfx.torch_private.graph_nodes import operands_of

EARLIER, LAST = "earlier", "last"  # sink and source of the flow network: operators of earlier stages, of the last stage


def with_loss_stage(facts: Facts, with_trained_heads: bool = False) -> Facts | None:
    """Return the facts with other stages, of which the last has only the head and the loss; None if that is not possible.

    `with_trained_heads` allows trained weights in the heads (the last products before the loss).
    """
    last_operators = _LossSearch(facts, with_trained_heads).operators()
    return replace(facts, found_stages=stages_with_last(last_operators, facts)) if last_operators else None


class _LossSearch:
    """Searches for the operators of a separate last stage by a minimum cut in the forward graph."""

    def __init__(self, facts: Facts, with_trained_heads: bool) -> None:
        self.with_trained_heads = with_trained_heads
        self.facts, self.storage_classes, self.static = facts, facts.access.storage_classes, facts.axes.static
        self.forward = [node for node in facts.joint.nodes if node in facts.joint.forward]
        self.nodes = [node for node in self.forward if node not in self.static]
        self.trained = trained_values(facts.joint)

    def operators(self) -> frozenset[fx.Node]:
        """Return the operators of the last stage, with the cut before them that stores the fewest bytes.

        An empty set if there is no head, if attention or a trained layer depends on a head, or if no cut is possible.
        """
        heads = self._heads()
        earlier = ancestors(tuple(node for node in self.nodes if self._must_be_earlier(node, heads)))
        if not heads or not heads.isdisjoint(earlier):
            return frozenset()
        network = self._network(heads, earlier)
        if EARLIER not in network:
            return frozenset()
        # of all minimum cuts, networkx returns the one closest to the earlier operators
        bytes_at_cut, (last_side, _) = networkx.minimum_cut(network, LAST, EARLIER)
        if bytes_at_cut >= PROHIBITIVE_COST:
            return frozenset()
        return frozenset(node for node in self.nodes if (node, "in") in last_side)

    def _network(self, heads: set[fx.Node], earlier: Collection[fx.Node]) -> Any:
        """Build the flow network of which a minimum cut separates the last stage (`LAST`) from earlier ones (`EARLIER`).

        Each node is two vertices; the edge from "out" to "in" has its bytes as capacity. Edges lead from a node to its
        operands. `heads` must be in the last stage, `earlier` in earlier stages.
        """
        network, nodes = networkx.DiGraph(), set(self.nodes)
        network.add_edges_from((LAST, (node, "in")) for node in heads)  # edges without `capacity` have no limit
        for node in self.nodes:
            if node in earlier:
                continue
            network.add_edge((node, "out"), (node, "in"), capacity=self._bytes(node))
            for source in nodes.intersection(node.all_input_nodes):
                network.add_edge((node, "in"), (source, "out"))
                if source in earlier:
                    network.add_edge((source, "out"), EARLIER, capacity=self._bytes(source))
                else:  # descendants of a value of the last stage are in the last stage
                    network.add_edge((source, "in"), (node, "in"))
        return network

    def _heads(self) -> set[fx.Node]:
        """Return the last products on the paths from trained values to outputs: products on rows that no product depends on.

        Recurrences are not heads.
        """
        on_paths = self.trained & ancestors(self.facts.joint.outputs)
        ancestors_of_products: set[fx.Node] = set()
        heads: set[fx.Node] = set()
        for node in reversed(self.nodes):
            is_chunked_product = is_product(node) and self.facts.access.is_in_loop(node)
            is_last = is_chunked_product and node in on_paths and node not in ancestors_of_products
            if is_last and not self.facts.axes.is_running(producer_of(node)):
                heads.add(node)
            if is_chunked_product or node in ancestors_of_products:
                ancestors_of_products.update(node.all_input_nodes)
        return heads

    def _must_be_earlier(self, node: fx.Node, heads: set[fx.Node]) -> bool:
        """Return whether an operator must be in an earlier stage: attention, a scan, or one that reads a trained weight.

        Heads may read trained weights if `with_trained_heads`.
        """
        if node in self.facts.key_spans.spans or self.facts.axes.is_running(node):
            return True
        return self._is_trained(node) and not (self.with_trained_heads and node in heads)

    def _is_trained(self, node: fx.Node) -> bool:
        """Return whether an operator on rows reads a trained weight, or a value computed from weights outside loops."""
        return self.facts.access.is_in_loop(node) and not self.weights.isdisjoint(operands_of(node))

    @cached_property
    def weights(self) -> set[fx.Node]:
        """Trained weights, and values computed from them outside loops."""
        weights = (node for node in self.facts.joint.primals if node in self.trained and not self.facts.access.is_in_loop(node))
        return descendants(
            weights, (node for node in self.forward if node in self.static or not self.facts.access.is_in_loop(node))
        )

    def _bytes(self, node: fx.Node) -> int:
        """Return the bytes that a cut after a value stores: 0 for values outside loops and sums, as they exist in any case.

        `PROHIBITIVE_COST` for values that cannot cross a cut: query-by-key values, and tuples.
        """
        if not self.facts.access.is_in_loop(node) or self.storage_classes[node] == (StorageClass.SUM,):
            return 0
        has_rows = self.storage_classes[node] == (StorageClass.ROWS,) and is_tensor(node)
        return max(1, bytes_like(node.meta[VALUE])) if has_rows else PROHIBITIVE_COST
