"""Where does a body wait for what is reduced over ranks? In front of whoever needs it first, so that others compute meanwhile.

    r = begin(x); y = end(r); z = mm(a, b); w = add(y, z)    ->    r = begin(x); z = mm(a, b); y = end(r); w = add(y, z)

Where reductions begin is left as it is: their order is that of the joint graph, the same on all ranks.
"""

from __future__ import annotations

from torch import fx

from streamfx.runtime.collective_calls import end


def wait_late(graph: fx.Graph) -> None:
    """Move each wait of a body to its first user."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if node.target is end and node.users:
            min(node.users, key=order.__getitem__).prepend(node)
