"""What waits on the host for the backward half."""

from __future__ import annotations

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts
from streamfx.planner.devices import TOGETHER
from streamfx.runtime.offload import to_host


def bytes_on_host(facts: Facts) -> int:
    """Bytes that one device's graph leaves on the host at the end of its forward half, when it holds most."""
    if facts.program is None:
        return 0
    nodes = facts.program.forward.graph.find_nodes(op="call_function", target=to_host)
    return sum(bytes_like(node.meta["val"]) for node in nodes)


def sharing(world: int) -> int:
    """How many devices share the memory of a host."""
    return min(world, TOGETHER)
