"""Find which values flow from loop to loop through the forward and the backward host program."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts
from streamfx.ir.joint import saved_values
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop


class LoopTraffic(NamedTuple):
    """Bytes that one loop reads of another loop's results, directly or through operators between the two."""

    source: str
    target: str
    bytes: int


def flow_of(facts: Facts) -> list[LoopTraffic]:
    """Return the traffic between the loops of a graph in execution order; empty if the graph has no loops."""
    program = facts.program
    if program is None:
        return []
    producers: dict[fx.Node, frozenset[str]] = {}
    traffic = _flow_of_half(program.forward, producers)
    if program.backward is not None:
        saved = saved_values(program.forward.graph, program.backward.graph, len(facts.joint.outputs))
        producers |= {input_: producers.get(node, frozenset()) for input_, node in saved.items()}
        traffic |= _flow_of_half(program.backward, producers)
    return [LoopTraffic(source, target, size) for (source, target), size in traffic.items()]


def _flow_of_half(host: fx.GraphModule, producers: dict[fx.Node, frozenset[str]]) -> dict[tuple[str, str], int]:
    """Return the bytes that flow between each pair of loops of a host program.

    `producers` maps each value to the loops that it comes from, and is extended here.
    """
    traffic: dict[tuple[str, str], int] = {}
    for node in host.graph.nodes:
        loop = host.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(loop, Loop):
            for operand in node.all_input_nodes:
                for source in producers.get(operand, ()):
                    pair = source, loop.spec.name
                    traffic[pair] = traffic.get(pair, 0) + bytes_like(operand.meta.get(VALUE))
            producers[node] = frozenset([loop.spec.name])
        elif node.op != "placeholder":
            producers[node] = frozenset(name for operand in node.all_input_nodes for name in producers.get(operand, ()))
    return traffic
