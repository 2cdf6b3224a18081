"""Writes recurrences into a graph in place of the unrolled loops that they were found in."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from streamfx.ir.joint import drop_unused
from streamfx.node_meta import FORWARD_OPERATOR, UNROLLED, VALUE
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.schedule import RecurrenceCall, RecurrencePair
from streamfx.runtime.chunked_recurrences import UnrolledRecurrence

CROSSED = "a loop over rows needs what another one makes, and that one needs what the first makes, so that it stays unrolled"


def roll(plan: RecurrencePair, graph: fx.Graph, stands_for: dict[fx.Node, fx.Node]) -> None:
    """Use an unrolled loop's operators in its place; those that it consisted of are left without users.

    `stands_for` says what is used in place of values of the loops that were rolled up before, and then of this one's, too.
    """
    forward = None if plan.forward is None else _written(plan.forward, plan.inside, graph, stands_for)
    if plan.backward is not None:
        _written(plan.backward, plan.inside, graph, stands_for).meta[FORWARD_OPERATOR] = forward


def _written(half: RecurrenceCall, inside: frozenset[fx.Node], graph: fx.Graph, stands_for: dict[fx.Node, fx.Node]) -> fx.Node:
    values = [join.node for join in half.joins] + list(half.finals)
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(
            UnrolledRecurrence(half.plan), tuple(stands_for.get(operand, operand) for operand in half.operands)
        )  # type: ignore[arg-type]
        results = [graph.call_function(operator.getitem, (made, position)) for position in range(len(values))]
    made.meta = {**values[0].meta, VALUE: tuple(value.meta[VALUE] for value in values), UNROLLED: unrolled_name(half)}
    for result, value in zip(results, values, strict=True):
        result.meta = dict(value.meta)
    for join, result in zip(half.joins, results, strict=False):
        join.node.replace_all_uses_with(result, propagate_meta=False)
    for node, result in zip(half.finals, results[len(half.joins) :], strict=True):
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside, propagate_meta=False)
    stands_for |= dict(zip(values, results, strict=True))
    return made


def unrolled_name(half: RecurrenceCall) -> str:
    """The name of the first value that an unrolled loop leaves: by it the loop is known before it is rolled up."""
    return [*(join.node for join in half.joins), *half.finals][0].name


def _crossed(path: Sequence[fx.Node]) -> Exception:
    """What to raise where a value would follow from itself: one of the loops on the way stays unrolled."""
    loop = next((node for node in path if UNROLLED in node.meta), path[-1])
    found = FallbackError(loop, CROSSED)
    found.name = loop.meta.get(UNROLLED, loop.name)
    return found


def sort_again(graph: fx.Graph) -> None:
    """Put operators behind their operands, and else leave them where they are; drop those without users."""
    drop_unused(graph, is_random)
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
                raise _crossed(todo)
            waiting.add(node)
            todo.extend(reversed(missing))
    return list(placed)
