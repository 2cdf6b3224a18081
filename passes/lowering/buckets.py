"""Coalesce collectives of one kind and group that are placed between the same two loops.

    a = all_gather(shard a)              both = all_gather_coalesced([shard a, shard b])
    b = all_gather(shard b)       ->     a, b = both[0], both[1]
    wait(a), wait(b)                     wait(a), wait(b)

So a stage has one call for its weights, and one for its gradients. Each value keeps its own memory: nothing is
copied. Like the placement of collectives, the buckets depend only on the order of loops and values, which is the same
on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import REGION, VALUE
from streamfx.passes.lowering.reinsert_collectives import is_computing
from streamfx.passes.ops.collectives import coalesced_operator, find_group_name, is_wait
from streamfx.torch_private.groups import supports_coalescing


@dataclass(frozen=True)
class Buckets:
    """The pass: coalesces collectives on weights and their gradients."""

    name: ClassVar[str] = "buckets"

    def apply(self, facts: Facts) -> Facts:
        """Coalesce the collectives of the forward and the backward host program, in place; return the same facts."""
        program = facts.program
        if facts.collectives is None or program is None:
            return facts
        for host_program in (program.forward, program.backward):
            if host_program is not None:
                coalesce_collectives(host_program.graph)
                host_program.graph.lint()
                host_program.recompile()
        return facts


def coalesce_collectives(graph: fx.Graph) -> None:
    """Coalesce the collectives of a host program where possible, in place. Collectives are moved before earlier waits."""
    writer = GraphWriter(graph)
    for nodes, end in list(_between_loops(graph)):
        ordered = _starts_before_waits(nodes)
        for node in ordered:
            end.prepend(node)
        for bucket in _group_coalescable(ordered):
            _coalesce(bucket, writer)


def _between_loops(graph: fx.Graph) -> Iterator[tuple[list[fx.Node], fx.Node]]:
    """Yield, for each loop, full-sequence operator or output: the operators since the one before it, and the node itself.

    The operators between are collectives, waits and views.
    """
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if is_computing(node) or node.op == "output":
            yield nodes, node
            nodes = []
        elif node.op == "call_function":
            nodes.append(node)


def _starts_before_waits(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Sort nodes by the number of waits among their ancestors, so that collectives start before the waits for others."""
    waits: dict[fx.Node, int] = {}
    for node in nodes:
        waits[node] = max((waits.get(source, 0) for source in node.all_input_nodes), default=0) + is_wait(node)
    return sorted(nodes, key=waits.__getitem__)


def _group_coalescable(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Group the collectives among `nodes` that one coalesced call can replace: they are equal in `_bucket_key`.

    A group ends before the first node that reads a member's result, because the call computes all results at once.
    """
    open_groups: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        for key in [key for key, members in open_groups.items() if not set(members).isdisjoint(node.all_input_nodes)]:
            yield open_groups.pop(key)
        if REGION not in node.meta and coalesced_operator(node) is not None:  # the user's own collectives have a region
            open_groups.setdefault(_bucket_key(node), []).append(node)
    yield from open_groups.values()


def _bucket_key(node: fx.Node) -> Any:
    """Return the properties that coalesced collectives share: operator, group and other arguments, dtype and device."""
    (operand,) = node.all_input_nodes
    value = operand.meta[VALUE]
    return node.target, node.args[1:], value.dtype, value.device


def _coalesce(bucket: Sequence[fx.Node], writer: GraphWriter) -> None:
    """Replace several collectives, in place, by one at the position of the last. A single one stays, and so do those of a
    process group whose backend cannot coalesce.
    """
    target, last = coalesced_operator(bucket[0]), bucket[-1]
    device, group = last.all_input_nodes[0].meta[VALUE].device, find_group_name(last)
    if len(bucket) == 1 or group is None or not supports_coalescing(group, device):
        return
    coalesced = writer.move_before(last).call(target, [node.args[0] for node in bucket], *last.args[1:])
    for i, node in enumerate(bucket):
        result = writer.move_before(last).call(operator.getitem, coalesced, i)
        node.replace_all_uses_with(result)
    for node in bucket:
        writer.graph.erase_node(node)
