"""The values alive at the memory peak, grouped by operator, with the line of user code that computes each.

Only the host program is followed: buffers inside a loop body are not included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    nodes_by_operator: dict[str, list[fx.Node]] = {}
    for node in sorted(most_alive(*graph.that_run, graph.num_outputs), key=lambda node: node.name):
        producer = producer_of(node)
        operator = f"loop {producer.target}" if producer.op == "call_module" else str(producer.target)
        nodes_by_operator.setdefault(operator, []).append(node)
    items: list[dict[str, Any]] = []
    for operator, nodes in nodes_by_operator.items():
        where = next((line for node in nodes if (line := source_line(producer_of(node)) or source_line(node))), "")
        items.append({"operator": operator, "where": where, "bytes": bytes_of_values(nodes), "values": len(nodes)})
    largest = sorted(items, key=lambda item: -item["bytes"])[:MAX_OPERATORS]
    return [item for item in largest if item["bytes"] >= MIN_SHARE * cost.peak]


def most_alive(forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> Values:
    """Return the values alive at the peak of a forward and backward graph. Forward outputs live until the end."""
    moments = list(_moments(forward, {}))
    if backward is not None:
        saved = saved_values(forward.graph, backward.graph, num_outputs)
        aliased = {placeholder: frozenset(computed_memories([node])) for placeholder, node in saved.items()}
        results = computed_memories(node for node in outputs_of(forward.graph)[:num_outputs] if isinstance(node, fx.Node))
        moments += _moments(backward, aliased, frozenset(results))
    return max(moments, key=lambda moment: moment[0], default=(0, frozenset()))[1]


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
