"""The structure of a graph, independent of the names in it."""

from __future__ import annotations

from torch import fx

Structure = tuple[tuple[str, str, str], ...]


def structure(graph: fx.Graph) -> Structure:
    """Return (op, target, arguments) of each node, with node indices in place of names: equal graphs have equal structures.

    `%3 = mul(%0, %2)` becomes ("call_function", "aten.mul.Tensor", "((%0, %2), {})"). Module calls compare by the module's name.
    """
    node_index: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda operand: f"%{node_index[operand]}")
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append((node.op, target, repr(arguments)))
        node_index[node] = len(node_index)
    return tuple(lines)
