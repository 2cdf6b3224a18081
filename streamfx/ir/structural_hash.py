"""The structure of a graph, independent of the names in it."""

from __future__ import annotations

from torch import fx

Structure = tuple[tuple[str, str, str], ...]


def structure(graph: fx.Graph) -> Structure:
    """Return the graph with indices in place of names: equal graphs have equal structures. Module calls compare by name."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append((node.op, target, repr(arguments)))
        number[node] = len(number)
    return tuple(lines)
