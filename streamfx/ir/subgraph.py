"""A subgraph that computes one value from another, extracted from one graph and inserted into another."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from streamfx.node_meta import VALUE


@dataclass(frozen=True)
class Subgraph:
    """A graph with one input and one result."""

    graph: fx.Graph

    @staticmethod
    def between(source: fx.Node, result: fx.Node, nodes: Collection[fx.Node]) -> Subgraph:
        """Return a copy of `nodes`, the operators of a graph that compute `result` from `source` alone."""
        graph = fx.Graph()
        copies = {source: graph.placeholder(source.name)}
        copies[source].meta = {VALUE: source.meta[VALUE]}
        for node in sorted(nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[result])
        return Subgraph(graph)

    @property
    def source(self) -> fx.Node:
        """The input."""
        return next(iter(self.graph.nodes))

    @property
    def result(self) -> fx.Node:
        """The result."""
        return self.graph.output_node().all_input_nodes[0]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in order."""
        return list(self.graph.nodes)[1:-1]

    def insert_into(self, source: fx.Node, insertion_point: Callable[[fx.Node], fx.Node]) -> dict[fx.Node, fx.Node]:
        """Insert a copy of the operators into another graph, to compute the result from its node `source`.

        The copy of operator `node` is placed before `insertion_point(node)`. Return the copies by node of this subgraph; its
        input maps to `source`.
        """
        copies = {self.source: source}
        for node in self.nodes:
            with source.graph.inserting_before(insertion_point(node)):
                copies[node] = source.graph.node_copy(node, copies.__getitem__)
        return copies
