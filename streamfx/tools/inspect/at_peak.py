"""The values alive at the memory peak, grouped by operator, with the line of user code that computes each.

Only the host program is followed: buffers inside a loop body are not included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from streamfx.cost.memory import Cost, bytes_of_values
from streamfx.ir.joint import outputs_of, saved_values
from streamfx.passes.ops.aliasing import computed_memories, memories
from streamfx.passes.ops.traits import producer_of
from streamfx.tools.inspect.tracing import TracedGraph
from streamfx.torch_private.lines import source_line

MAX_OPERATORS = 3  # operators listed at most
MIN_SHARE = 0.1  # of the peak: smaller groups are not listed

Values = frozenset[fx.Node]


def alive_at_peak(graphs: Sequence[TracedGraph], costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Return the largest values alive at the peak of the graph with the highest peak, largest first, as JSON types.

    Values of the same operator form one item: `bytes` in total, the number of `values`, and `where` the first is computed.
    """
    graph, cost = max(zip(graphs, costs, strict=True), key=lambda item: item[1].peak)
    items = _by_operator(most_alive(*graph.that_run, graph.num_outputs)[1])
    return [item for item in items if item["bytes"] >= MIN_SHARE * cost.peak][:MAX_OPERATORS]


def most_alive(forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> tuple[int, Values]:
    """Return the peak bytes of a forward and backward graph and the values alive then. Forward outputs live until the end."""
    moments = list(_moments(forward, {}))
    if backward is not None:
        saved = saved_values(forward.graph, backward.graph, num_outputs)
        aliased = {placeholder: frozenset(computed_memories([node])) for placeholder, node in saved.items()}
        results = computed_memories(node for node in outputs_of(forward.graph)[:num_outputs] if isinstance(node, fx.Node))
        moments += _moments(backward, aliased, frozenset(results))
    return max(moments, key=lambda moment: moment[0], default=(0, frozenset()))


def _moments(
    module: fx.GraphModule, aliased: Mapping[fx.Node, Values], kept_alive: Values = frozenset()
) -> Iterator[tuple[int, Values]]:
    """Yield the bytes and the values alive after an operator whenever the bytes exceed all earlier totals.

    `aliased` maps a placeholder of the backward graph to the forward values whose memory it uses; `kept_alive` stay alive.
    """
    values: dict[fx.Node, Values] = {}
    last_user: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        views = (aliased.get(memory, {memory} if memory.op == "call_function" else ()) for memory in memories(node))
        values[node] = frozenset().union(*views)
        last_user.update((value, node) for source in node.all_input_nodes for value in values[source] - kept_alive)
    alive = set(kept_alive).union(*(shared for node, shared in aliased.items() if node.users))
    bytes_now, highest = bytes_of_values(alive), 0
    for node in module.graph.nodes:
        if node in values[node]:
            alive.add(node)
            bytes_now += bytes_of_values([node])
        if bytes_now > highest:
            highest = bytes_now
            yield bytes_now, frozenset(alive)
        dead = {value for source in node.all_input_nodes for value in values[source] if last_user.get(value) is node}
        alive -= dead
        bytes_now -= bytes_of_values(dead)


def _by_operator(values: Collection[fx.Node]) -> list[dict[str, Any]]:
    """Return one item per operator with the bytes, count and source line of its values, largest first."""
    groups: dict[str, list[fx.Node]] = {}
    for node in sorted(values, key=lambda node: node.name):
        groups.setdefault(_operator_name(node), []).append(node)
    items = []
    for operator, nodes in groups.items():
        where = next((line for node in nodes if (line := source_line(producer_of(node)) or source_line(node))), "")
        items.append({"operator": operator, "where": where, "bytes": bytes_of_values(nodes), "values": len(nodes)})
    return sorted(items, key=lambda item: -item["bytes"])


def _operator_name(node: fx.Node) -> str:
    """Return the name of the loop or of the operator that computes a node."""
    producer = producer_of(node)
    return f"loop {producer.target}" if producer.op == "call_module" else str(producer.target)
