"""Describe the order of a program's collectives as text, which ranks compare (`streamfx/distributed/rank_consensus.py`).

If ranks called collectives in different orders, they would wait for each other forever. A *group* is a process group, by name.
Some collectives are in the host program, between loops; others (reductions of a chunk's rows) are in loop bodies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import bound_arguments, is_tensor
from streamfx.node_meta import COLLECTIVE_TEXT, TRACED_NAME, VALUE
from streamfx.passes.ops.collectives import find_group_name, is_collective
from streamfx.rank_errors import NUMBER
from streamfx.runtime.collective_calls import begin
from streamfx.runtime.loop import Loop
from streamfx.torch_private.lines import source_line

UNCHUNKED = "unchunked"  # a graph without a program


def describe_order_with_chunks(facts: Facts, group: str) -> str:
    """Return a line for each collective of a program in order, with the chunks and reduced values of each loop.

    Of other groups' collectives between loops, only the operator. "unchunked" if there is no program.
    """
    if facts.program is None:
        return UNCHUNKED
    lines = []
    for direction, host_program in (("forward", facts.program.forward), ("backward", facts.program.backward)):
        lines.append(direction)
        if host_program is None:
            continue
        for node in host_program.graph.nodes:
            if node.op == "call_module":
                lines += _lines_of_loop(host_program.get_submodule(str(node.target)))
            elif is_collective(node):
                lines.append(f"  {_call_text(node, group)}")
    return "\n".join(lines)


def describe_order_between_loops(facts: Facts, group: str) -> str:
    """Describe the order of a group's collectives between loops, independently of lengths and of other groups.

    A collective of the traced graph is identified by its index there, an inserted one by its operands.
    """
    labels = _traced_labels(facts, group)
    if facts.program is None:
        return "\n".join((UNCHUNKED, *labels.values()))
    host_programs = (facts.program.forward, facts.program.backward)
    nodes = (node for host in host_programs if host is not None for node in _of_group(host.graph, group))
    return "\n".join(labels.get(node.meta.get(TRACED_NAME, "")) or _call_text(node, group) for node in nodes)


def describe_weight_collectives(facts: Facts, group: str) -> str:
    """Return a sorted line for each weight that is gathered over a group, an empty line, and one for each reduced gradient.

    Unlike the order of these collectives, the text is equal for all sequence lengths.
    """
    collectives = facts.collectives
    gathers_and_reductions = (
        ([], [])
        if collectives is None
        else ([gather.subgraph for gather in collectives.gathers.values()], list(collectives.reductions.values()))
    )
    return "\n\n".join(
        "\n".join(sorted(chain(*(_sent_values(node) for subgraph in subgraphs for node in _of_group(subgraph.graph, group)))))
        for subgraphs in gathers_and_reductions
    )


def describe_traced_order(graph: fx.Graph, group: str) -> str:
    """Return a line for each of a group's collectives in a traced graph, in order, with the line of the user's code."""
    return "\n".join(f"{_operator_name(node)} {source_line(node)}" for node in _of_group(graph, group))


def _of_group(graph: fx.Graph, group: str) -> list[fx.Node]:
    """Return a group's collectives in a graph, in order."""
    return [node for node in graph.nodes if is_collective(node) and find_group_name(node) == group]


def _traced_labels(facts: Facts, group: str) -> dict[str, str]:
    """Return, by node name, a text for each of a group's collectives in the traced graph: the operator, and its index there."""
    return {node.name: f"{_operator_name(node)}{NUMBER}{i}" for i, node in enumerate(_of_group(facts.joint.graph, group))}


def _sent_values(node: fx.Node) -> list[str]:
    """Return a line for each value that a collective sends (several if coalesced): operator, dtype and sizes, other arguments."""
    name, (operand, *others) = _operator_name(node), bound_arguments(node).values()
    values = operand if isinstance(operand, (list, tuple)) else [operand]
    return [f"{name.removesuffix('_coalesced')} {_type_and_sizes(value)} {others}" for value in values]


def _lines_of_loop(loop: Any) -> Iterator[str]:
    """Yield the chunks of a loop that reduces values over ranks, and a line for each value; nothing for other loops."""
    nodes = loop.spec.body.graph.nodes if isinstance(loop, Loop) else ()
    reductions = [str(node.meta[COLLECTIVE_TEXT]) for node in nodes if node.target is begin]
    if reductions:
        direction = "backwards" if loop.spec.reverse else "forwards"
        yield f"  {direction} {loop.spec.chunk_size} of {loop.spec.length}"
        yield from reductions


def _call_text(node: fx.Node, group: str) -> str:
    """Describe a collective and its arguments; of another group only the operator, because names and sizes differ there."""
    if find_group_name(node) != group:
        return f"{_operator_name(node)} of others"
    arguments: Any = list(bound_arguments(node).values())
    return f"{_operator_name(node)} {fx.node.map_arg(arguments, _type_and_sizes)}"


def _operator_name(node: fx.Node) -> str:
    """Return the operator's name without namespace and overload."""
    return str(node.target).split(".")[1]


def _type_and_sizes(node: fx.Node) -> str:
    """Describe a tensor by dtype and shape, any other value as "_"."""
    return f"{node.meta[VALUE].dtype} {list(node.meta[VALUE].shape)}" if is_tensor(node) else "_"
