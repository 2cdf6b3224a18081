"""Place each wait for a reduction over ranks before its first user, so that other operators overlap with it.

    r = begin(x); y = end(r); z = mm(a, b); w = add(y, z)    ->    r = begin(x); z = mm(a, b); y = end(r); w = add(y, z)

The starts of reductions do not move: they keep the order of the joint graph, which is the same on all ranks.
"""

from __future__ import annotations

from torch import fx

from streamfx.runtime.collective_calls import end


def delay_waits(graph: fx.Graph) -> None:
    """Move each wait for a reduction (`end`) in a loop body right before its first user, in place."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if node.target is end and node.users:
            min(node.users, key=order.__getitem__).prepend(node)
