"""Writes recurrences into a graph in place of the unrolled loops that they were found in."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from streamfx.passes.recurrence_plans import Half, Planned
from streamfx.passes.unrolled import drop_unused
from streamfx.runtime.recurrences import Recurrence


def roll(plan: Planned, graph: fx.Graph) -> None:
    """Use an unrolled loop's operators in its place; those that it consisted of are left without users."""
    forward = None if plan.forward is None else _written(plan.forward, plan.inside, graph)
    if plan.backward is not None:
        _written(plan.backward, plan.inside, graph).meta["streamfx_forward"] = forward


def _written(half: Half, inside: frozenset[fx.Node], graph: fx.Graph) -> fx.Node:
    values = [join.node for join in half.joins] + list(half.finals)
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(Recurrence(half.plan), half.operands)  # type: ignore[arg-type]
        results = [graph.call_function(operator.getitem, (made, position)) for position in range(len(values))]
    made.meta = {**values[0].meta, "val": tuple(value.meta["val"] for value in values)}
    for result, value in zip(results, values, strict=True):
        result.meta = dict(value.meta)
    for join, result in zip(half.joins, results, strict=False):
        join.node.replace_all_uses_with(result, propagate_meta=False)
    for node, result in zip(half.finals, results[len(half.joins) :], strict=True):
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside, propagate_meta=False)
    return made


def sort_again(graph: fx.Graph) -> None:
    """Put operators behind their operands, and else leave them where they are; drop those without users."""
    drop_unused(graph)
    for node in _sorted(graph.nodes):
        if node.op not in ("placeholder", "output"):
            graph.output_node().prepend(node)


def _sorted(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    placed: dict[fx.Node, None] = {}
    for start in nodes:
        todo, waiting = [start], set[fx.Node]()
        while todo:
            node = todo[-1]
            if node in placed:
                todo.pop()
                continue
            missing = [source for source in node.all_input_nodes if source not in placed]
            if not missing:
                placed[node] = None
                continue
            if node in waiting:
                raise NotImplementedError(f"{node.name} follows from its own result")
            waiting.add(node)
            todo.extend(reversed(missing))
    return list(placed)
