"""What two graphs have in common when only names differ."""

from __future__ import annotations

from torch import fx

Structure = tuple[tuple[str, str, str], ...]


def structure(graph: fx.Graph) -> Structure:
    """A graph with numbers in place of names: equal graphs have equal ones. Calls of modules go by name."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append((node.op, target, repr(arguments)))
        number[node] = len(number)
    return tuple(lines)
