"""Replace unrolled loops in a graph by recurrence operators.

A loop over rows that tracing unrolled is rerolled: one operator computes its results, from steps that a plan lists. The
results are concatenations (one value per row, stacked), and values of a single row, such as the final state.
"""

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
    """Insert the forward and backward recurrence operators of one loop, and replace the loop's results by theirs, in place.

    The loop's operators remain in the graph; those without users are erased later. `replacements` maps the results of loops
    that were rerolled earlier to their new nodes, because the plan's operands are the old ones; this call adds its results.
    """
    forward = None if plan.forward is None else _insert(plan.forward, plan.inside, graph, replacements)
    if plan.backward is not None:
        _insert(plan.backward, plan.inside, graph, replacements).meta[FORWARD_OPERATOR] = forward


def _insert(call: RecurrenceCall, inside: frozenset[fx.Node], graph: fx.Graph, replacements: dict[fx.Node, fx.Node]) -> fx.Node:
    """Insert a recurrence operator at the end of the graph, replace the results of the loop by its results, and return it.

    `inside`: the loop's operators, which keep reading the old values. `replacements`: see `reroll`; it is updated. The order
    of the graph is wrong until `sort_topologically`.
    """
    old_results = [concat.node for concat in call.concats] + list(call.single_row_results)
    with graph.inserting_before(graph.output_node()):
        recurrence = graph.call_function(
            UnrolledRecurrence(call.plan), tuple(replacements.get(operand, operand) for operand in call.operands)
        )  # type: ignore[arg-type]
        results = [graph.call_function(operator.getitem, (recurrence, index)) for index in range(len(old_results))]
    fake_results = tuple(value.meta[VALUE] for value in old_results)
    recurrence.meta = {**old_results[0].meta, VALUE: fake_results, UNROLLED: unrolled_name(call)}
    for result, value in zip(results, old_results, strict=True):
        result.meta = dict(value.meta)
    for concat, result in zip(call.concats, results, strict=False):
        concat.node.replace_all_uses_with(result, propagate_meta=False)
    for node, result in zip(call.single_row_results, results[len(call.concats) :], strict=True):
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside, propagate_meta=False)
    replacements |= dict(zip(old_results, results, strict=True))
    return recurrence


def unrolled_name(call: RecurrenceCall) -> str:
    """Return the node name of an unrolled loop's first result. Fallbacks identify the loop by it in later attempts."""
    return [*(concat.node for concat in call.concats), *call.single_row_results][0].name


def _cycle_error(path: Sequence[fx.Node]) -> Exception:
    """Return the error for nodes on a cycle (`path`): the next attempt does not reroll the first loop on it.

    Two recurrence operators form a cycle if each reads a result of the other. `error.operator_name` identifies the loop.
    """
    loop = next((node for node in path if UNROLLED in node.meta), path[-1])
    error = FallbackError(loop, MUTUALLY_DEPENDENT)
    error.operator_name = loop.meta.get(UNROLLED, loop.name)
    return error


def sort_topologically(graph: fx.Graph) -> None:
    """Erase unused nodes and sort the others topologically, in place. Nodes that do not depend on each other keep their order.

    Raise `FallbackError` if two recurrence operators depend on each other.
    """
    erase_unused(graph, is_random)
    for node in _topological_order(graph.nodes):
        if node.op not in ("placeholder", "output"):
            graph.output_node().prepend(node)


def _topological_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return each node after its inputs (a depth-first search from each node in the given order); raise for a cycle."""
    sorted_nodes: dict[fx.Node, None] = {}
    for start in nodes:
        todo = [start]
        on_path: set[fx.Node] = set()
        while todo:
            node = todo[-1]
            if node in sorted_nodes:
                todo.pop()
                continue
            unsorted_inputs = [source for source in node.all_input_nodes if source not in sorted_nodes]
            if not unsorted_inputs:
                sorted_nodes[node] = None
                continue
            if node in on_path:  # visited a second time, and an input still waits for it
                raise _cycle_error(todo)
            on_path.add(node)
            todo.extend(reversed(unsorted_inputs))
    return list(sorted_nodes)
