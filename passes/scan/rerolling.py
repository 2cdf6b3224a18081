"""Replace unrolled loops in a graph by recurrence operators."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from streamfx.ir.joint import erase_unused
from streamfx.node_meta import FORWARD_OPERATOR, UNROLLED, VALUE
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import is_random
from streamfx.passes.scan.schedule import RecurrenceCall, RecurrencePair
from streamfx.runtime.chunked_recurrences import UnrolledRecurrence

MUTUALLY_DEPENDENT = "two loops over rows depend on results of each other, so one of them stays unrolled"


def reroll(plan: RecurrencePair, graph: fx.Graph, replacements: dict[fx.Node, fx.Node]) -> None:
    """Insert the recurrence operators, and replace the loop's results by theirs, in place.

    The loop's operators remain, without users. `replacements` maps results of loops that were rerolled before to their new
    nodes; the results of this loop are added.
    """
    forward = None if plan.forward is None else _insert(plan.forward, plan.inside, graph, replacements)
    if plan.backward is not None:
        _insert(plan.backward, plan.inside, graph, replacements).meta[FORWARD_OPERATOR] = forward


def _insert(call: RecurrenceCall, inside: frozenset[fx.Node], graph: fx.Graph, replacements: dict[fx.Node, fx.Node]) -> fx.Node:
    """Insert a recurrence operator before the output, and replace the results of the unrolled loop."""
    values = [concat.node for concat in call.concats] + list(call.single_row_results)
    with graph.inserting_before(graph.output_node()):
        recurrence = graph.call_function(
            UnrolledRecurrence(call.plan), tuple(replacements.get(operand, operand) for operand in call.operands)
        )  # type: ignore[arg-type]
        results = [graph.call_function(operator.getitem, (recurrence, position)) for position in range(len(values))]
    recurrence.meta = {**values[0].meta, VALUE: tuple(value.meta[VALUE] for value in values), UNROLLED: unrolled_name(call)}
    for result, value in zip(results, values, strict=True):
        result.meta = dict(value.meta)
    for concat, result in zip(call.concats, results, strict=False):
        concat.node.replace_all_uses_with(result, propagate_meta=False)
    for node, result in zip(call.single_row_results, results[len(call.concats) :], strict=True):
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside, propagate_meta=False)
    replacements |= dict(zip(values, results, strict=True))
    return recurrence


def unrolled_name(call: RecurrenceCall) -> str:
    """Return the name of the first result of an unrolled loop, which identifies it before it is rerolled."""
    return [*(concat.node for concat in call.concats), *call.single_row_results][0].name


def _cycle_error(path: Sequence[fx.Node]) -> Exception:
    """Return the error for a cycle in the graph: one of the loops on it is not rerolled."""
    loop = next((node for node in path if UNROLLED in node.meta), path[-1])
    error = FallbackError(loop, MUTUALLY_DEPENDENT)
    error.name = loop.meta.get(UNROLLED, loop.name)
    return error


def sort_topologically(graph: fx.Graph) -> None:
    """Sort the graph topologically, in place, otherwise in its order, and erase unused nodes."""
    erase_unused(graph, is_random)
    for node in _topological_order(graph.nodes):
        if node.op not in ("placeholder", "output"):
            graph.output_node().prepend(node)


def _topological_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes in topological order, otherwise in the given order; raise an error for a cycle."""
    sorted_nodes: dict[fx.Node, None] = {}
    for start in nodes:
        todo, on_path = [start], set[fx.Node]()
        while todo:
            node = todo[-1]
            if node in sorted_nodes:
                todo.pop()
                continue
            missing = [source for source in node.all_input_nodes if source not in sorted_nodes]
            if not missing:
                sorted_nodes[node] = None
                continue
            if node in on_path:
                raise _cycle_error(todo)
            on_path.add(node)
            todo.extend(reversed(missing))
    return list(sorted_nodes)
