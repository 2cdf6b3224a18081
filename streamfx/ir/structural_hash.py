"""The structure of a graph, independent of the names in it."""

from __future__ import annotations

from torch import fx

Structure = tuple[tuple[str, str, str], ...]


def structure(graph: fx.Graph) -> Structure:
    """Return the graph with indices in place of names: equal graphs have equal structures. Module calls compare by name."""
    node_index: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{node_index[source]}")
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append((node.op, target, repr(arguments)))
        node_index[node] = len(node_index)
    return tuple(lines)
