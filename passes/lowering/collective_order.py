"""Describe the order of a program's collectives as text, which ranks compare
(`streamfx/distributed/rank_consensus.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import bound_arguments, is_tensor
from streamfx.ir.program import Program
from streamfx.node_meta import REDUCED, TRACED, VALUE
from streamfx.passes.ops.collectives import group_of, is_collective
from streamfx.rank_errors import NUMBER
from streamfx.runtime.collective_calls import begin
from streamfx.runtime.loop import Loop
from streamfx.torch_private.lines import source_line

AS_IT_STANDS = "as it stands"  # for a graph without a program


def order_with_chunks(facts: Facts, group: str) -> str:
    """Describe the collectives of a program in order, with chunks and reduced values of each loop."""
    return AS_IT_STANDS if facts.program is None else "\n".join(_lines_of_program(facts.program, group))


def order_between_loops(facts: Facts, group: str) -> str:
    """Describe the order of a group's collectives between loops, independently of lengths and of other groups.

    A collective of the traced graph is identified by its index there, an inserted one by its operands.
    """
    numbers = _numbers(facts, group)
    if facts.program is None:
        return "\n".join((AS_IT_STANDS, *numbers.values()))
    halves = _between_loops(facts.program, group)
    return "\n".join(numbers.get(node.meta.get(TRACED, "")) or _call(node, group) for half in halves for node in half)


def values_of_weights(facts: Facts, group: str) -> str:
    """List the weights and gradients that are sent over a group, sorted: the same for all lengths."""
    collectives = facts.collectives
    sides = (
        ([], [])
        if collectives is None
        else ([item.subgraph for item in collectives.gathers.values()], list(collectives.reductions.values()))
    )
    lines_by_side = [
        sorted(chain(*(_values_sent(node) for stretch in side for node in _of_group(stretch.graph, group)))) for side in sides
    ]
    return "\n\n".join("\n".join(part) for part in lines_by_side)


def traced_order(graph: fx.Graph, group: str) -> str:
    """List a group's collectives in a traced graph in order, with the lines of the user's code that call them."""
    return "\n".join(f"{_name(node)} {source_line(node)}" for node in _of_group(graph, group))


def _between_loops(program: Program, group: str) -> list[list[fx.Node]]:
    """Return a group's collectives between loops, for the forward and the backward program."""
    return [_of_group(half.graph, group) for half in (program.forward, program.backward) if half is not None]


def _of_group(graph: fx.Graph, group: str) -> list[fx.Node]:
    """Return a group's collectives in a graph, in order."""
    return [node for node in graph.nodes if is_collective(node) and group_of(node) == group]


def _numbers(facts: Facts, group: str) -> dict[str, str]:
    """Return, by node name, the index of each of a group's collectives in the traced graph."""
    return {node.name: f"{_name(node)}{NUMBER}{i}" for i, node in enumerate(_of_group(facts.joint.graph, group))}


def _values_sent(node: fx.Node) -> list[str]:
    """Describe a coalesced collective as one collective per value."""
    name, (operand, *others) = _name(node), bound_arguments(node).values()
    values = operand if isinstance(operand, (list, tuple)) else [operand]
    return [f"{name.removesuffix('_coalesced')} {_type_and_sizes(value)} {others}" for value in values]


def _lines_of_program(program: Program, group: str) -> Iterator[str]:
    """Yield a line for each collective between loops or reduced value in loops, forward, then backward."""
    for name, half in (("forward", program.forward), ("backward", program.backward)):
        yield name
        if half is not None:
            yield from _lines_of_half(half, group)


def _lines_of_half(half: fx.GraphModule, group: str) -> Iterator[str]:
    """Yield the lines of one host program: of its loops, and of its collectives between them."""
    for node in half.graph.nodes:
        if node.op == "call_module":
            yield from _lines_of_loop(half.get_submodule(str(node.target)))
        elif is_collective(node):
            yield f"  {_call(node, group)}"


def _lines_of_loop(loop: Any) -> Iterator[str]:
    """Describe the chunks of a loop that reduces values over ranks, and the values."""
    nodes = loop.spec.body.graph.nodes if isinstance(loop, Loop) else ()
    reduced = [str(node.meta[REDUCED]) for node in nodes if node.target is begin]
    if reduced:
        order = "backwards" if loop.spec.reverse else "forwards"
        yield f"  {order} {loop.spec.chunk_size} of {loop.spec.length}"
        yield from reduced


def _call(node: fx.Node, group: str) -> str:
    """Describe the arguments of this group's collective; in other groups, names and sizes differ between ranks."""
    arguments: Any = list(bound_arguments(node).values())
    return (
        f"{_name(node)} {fx.node.map_arg(arguments, _type_and_sizes)}" if group_of(node) == group else f"{_name(node)} of others"
    )


def _name(node: fx.Node) -> str:
    """Return the operator's name without namespace and overload."""
    return str(node.target).split(".")[1]


def _type_and_sizes(node: fx.Node) -> str:
    """Describe a tensor by dtype and shape, any other value as "_"."""
    return f"{node.meta[VALUE].dtype} {list(node.meta[VALUE].shape)}" if is_tensor(node) else "_"
