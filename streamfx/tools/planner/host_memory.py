"""The values offloaded to the host for the backward graph, and the copies each loop causes."""

from __future__ import annotations

from typing import NamedTuple

from streamfx.cost.comm import DEVICES_PER_MACHINE
from streamfx.cost.memory import bytes_like
from streamfx.dialect.offload import from_host, to_host
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.node_meta import VALUE
from streamfx.runtime.pinned import bytes_pinned
from streamfx.tools.report.comm_table import HALVES, halves_of


class Copies(NamedTuple):
    """Bytes fetched from the host before a loop, and bytes copied to the host after it has computed them."""

    fetched: int = 0
    left: int = 0

    def plus(self, other: Copies) -> Copies:
        return Copies(self.fetched + other.fetched, self.left + other.left)


def bytes_on_host(facts: Facts) -> int:
    """Return the bytes, in whole pages, that one device's graph holds on the host at its peak, the end of the forward graph."""
    if facts.program is None:
        return 0
    nodes = facts.program.forward.graph.find_nodes(op="call_function", target=to_host)
    return sum(bytes_pinned(bytes_like(node.meta[VALUE])) for node in nodes)


def copies_by_loop(program: Program, num_outputs: int) -> dict[str, dict[str, Copies]]:
    """Return the copies of each loop, by forward or backward graph and by the loop's name."""
    by_half: dict[str, dict[str, Copies]] = {half: {} for half in HALVES}
    for name, host_program in halves_of(program, num_outputs):
        for node, loop_before in host_program.between():
            if node.target in (from_host, to_host):
                is_fetch = node.target is from_host
                size = bytes_like((node.all_input_nodes[0] if is_fetch else node).meta[VALUE])
                loop = host_program.loop_of(node, is_fetch, loop_before)
                copies = Copies(fetched=size) if is_fetch else Copies(left=size)
                by_half[name][loop] = by_half[name].get(loop, Copies()).plus(copies)
    return by_half


def devices_per_host(world: int) -> int:
    """Return how many devices share the memory of a host."""
    return min(world, DEVICES_PER_MACHINE)
