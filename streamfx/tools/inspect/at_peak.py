"""Which values are alive at the peak, by the operator and the line of the user's code that computes them.

This follows the outer graphs alone: what a loop computes for one chunk is not among the values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from streamfx.cost.memory import Cost, bytes_of_values
from streamfx.ir.joint import handed_over, outputs_of
from streamfx.passes.ops.aliasing import memories, memories_made
from streamfx.passes.ops.traits import producer_of
from streamfx.tools.inspect.tracing import TracedGraph
from streamfx.torch_private.lines import source_line

MOST = 3  # kinds of values that are named
SHARE = 0.1  # of the peak: values that take less are not named

Values = frozenset[fx.Node]


def alive_at_peak(graphs: Sequence[TracedGraph], costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Of the graph that takes the most bytes the values that take the most of them, largest first, in values that JSON knows.

    Values that the same operator computes are one item: `bytes` of all, how many `values`, `where` the first is computed.
    """
    graph, cost = max(zip(graphs, costs, strict=True), key=lambda item: item[1].peak)
    found = _by_operator(most_alive(*graph.that_run, graph.num_outputs)[1])
    return [item for item in found if item["bytes"] >= SHARE * cost.peak][:MOST]


def most_alive(forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> tuple[int, Values]:
    """The bytes at the peak of a graph's halves, and the values alive then. Its outputs live until the end."""
    moments = list(_moments(forward, {}))
    if backward is not None:
        saved = handed_over(forward.graph, backward.graph, num_outputs)
        shown = {placeholder: frozenset(memories_made([node])) for placeholder, node in saved.items()}
        results = memories_made(node for node in outputs_of(forward.graph)[:num_outputs] if isinstance(node, fx.Node))
        moments += _moments(backward, shown, frozenset(results))
    return max(moments, key=lambda moment: moment[0], default=(0, frozenset()))


def _moments(
    module: fx.GraphModule, shown: Mapping[fx.Node, Values], always: Values = frozenset()
) -> Iterator[tuple[int, Values]]:
    """Bytes alive after an operator, and the values, if more bytes are alive than after each operator before it.

    `shown` are the values of the forward half that each input of a backward half shows; `always` live until the end.
    """
    values: dict[fx.Node, Values] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        own = (shown.get(memory, {memory} if memory.op == "call_function" else ()) for memory in memories(node))
        values[node] = frozenset().union(*own)
        last.update((value, node) for source in node.all_input_nodes for value in values[source] - always)
    alive = set(always).union(*(found for node, found in shown.items() if node.users))
    bytes_now, most = bytes_of_values(alive), 0
    for node in module.graph.nodes:
        if node in values[node]:
            alive.add(node)
            bytes_now += bytes_of_values([node])
        if bytes_now > most:
            most = bytes_now
            yield bytes_now, frozenset(alive)
        dead = {value for source in node.all_input_nodes for value in values[source] if last.get(value) is node}
        alive -= dead
        bytes_now -= bytes_of_values(dead)


def _by_operator(values: Collection[fx.Node]) -> list[dict[str, Any]]:
    groups: dict[str, list[fx.Node]] = {}
    for node in sorted(values, key=lambda node: node.name):
        groups.setdefault(_operator(node), []).append(node)
    found = []
    for operator, nodes in groups.items():
        where = next((line for node in nodes if (line := source_line(producer_of(node)) or source_line(node))), "")
        found.append({"operator": operator, "where": where, "bytes": bytes_of_values(nodes), "values": len(nodes)})
    return sorted(found, key=lambda item: -item["bytes"])


def _operator(node: fx.Node) -> str:
    made = producer_of(node)
    return f"loop {made.target}" if made.op == "call_module" else str(made.target)
