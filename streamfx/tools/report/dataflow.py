"""Which loop hands what to which: the way of values through the loops of both halves."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts
from streamfx.ir.joint import handed_over
from streamfx.node_meta import VALUE
from streamfx.runtime.loop import Loop


class LoopTraffic(NamedTuple):
    """Bytes that a loop reads of what another has made, by itself or with operators between both."""

    source: str
    target: str
    bytes: int


def flow_of(facts: Facts) -> list[LoopTraffic]:
    """What loops of a graph hand to each other, in the order in which they run; nothing of a graph without loops."""
    program = facts.program
    if program is None:
        return []
    made: dict[fx.Node, frozenset[str]] = {}
    found = _flow_of_half(program.forward, made)
    if program.backward is not None:
        saved = handed_over(program.forward.graph, program.backward.graph, len(facts.joint.outputs))
        made |= {taken: made.get(node, frozenset()) for taken, node in saved.items()}
        found |= _flow_of_half(program.backward, made)
    return [LoopTraffic(source, target, size) for (source, target), size in found.items()]


def _flow_of_half(half: fx.GraphModule, made: dict[fx.Node, frozenset[str]]) -> dict[tuple[str, str], int]:
    """By pair of loops the bytes that one reads of the other's; `made` says of each value which loops it comes from."""
    found: dict[tuple[str, str], int] = {}
    for node in half.graph.nodes:
        loop = half.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(loop, Loop):
            for operand in node.all_input_nodes:
                for source in made.get(operand, ()):
                    found[source, loop.spec.name] = found.get((source, loop.spec.name), 0) + bytes_like(operand.meta.get(VALUE))
            made[node] = frozenset([loop.spec.name])
        elif node.op != "placeholder":
            made[node] = frozenset(name for operand in node.all_input_nodes for name in made.get(operand, ()))
    return found
