"""Replace operators with a state that packages or users declare (`streamfx.register_recurrence`) by recurrences.

A call and its backwards are replaced together: the loop that runs the call also stores the state at the start of each
chunk, which the backward needs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument
from streamfx.ir.scan_schema import NotStatefulError, Stateful, StatefulPlan, backward_plan, forward_plan
from streamfx.ir.sizes import shape_of
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import FORWARD_OPERATOR, VALUE, WHY_WHOLE
from streamfx.passes.ops.rules.stateful import STATEFUL
from streamfx.passes.rewrite.pattern import RewriteRule, results_in_use
from streamfx.passes.rewrite.views.no_ops import remove_alias
from streamfx.runtime.custom_scan import Backward, Forward
from streamfx.torch_private import OpOverload

TOGETHER = "results that are taken together"
LISTS = "a list of tensors"
SIZES = "an argument that is a size, {name}, and changes from call to call"
SAVED = "result {number} in use by more than its own backward"
OTHERS = "a backward that may be that of another call, with other arguments"
FLAGS = "result {number} in use, which is another where the state after the last row is asked for"


@dataclass(frozen=True)
class ScanCall:
    """A call of an operator with a state, or of its backward: arguments by name, users of each result, and result values."""

    node: fx.Node
    arguments: Mapping[str, Any]
    users_by_result: Mapping[int, Sequence[fx.Node]]
    results: Sequence[Any]

    @property
    def values(self) -> dict[str, Any]:
        """Return the traced values of the arguments: fake tensors instead of nodes."""
        return {name: value.meta[VALUE] if isinstance(value, fx.Node) else value for name, value in self.arguments.items()}

    def operands(self, names: Sequence[str]) -> list[fx.Node]:
        """Return the arguments of these names."""
        return [self.arguments[name] for name in names]


def stateful_operator_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """scan(x, first) -> y, last                       ->   recurrence(x, first) -> y, last
    scan_backward(dy, dlast, x, first) -> dx, dfirst   ->   recurrence(dy, dlast, x, first) -> dx, dfirst, in reverse
    """
    declared = STATEFUL[name_of(node)]
    backwards: list[ScanCall] = []
    try:
        call = read_call(node, declared)
        _check_names(declared, call)
        backwards += backwards_of(declared, call)
        return emit_recurrences(declared, call, backwards, writer)
    except NotStatefulError as why:
        for failed in (node, *(backward.node for backward in backwards)):
            failed.meta[WHY_WHOLE] = f"{failed.target} with {why}"
        return None


STATEFUL_OPERATOR_TO_RECURRENCE = RewriteRule("stateful_operator_to_recurrence", STATEFUL.keys(), stateful_operator_to_recurrence)


# -- reading calls


def name_of(node: fx.Node) -> str:
    """Return the name of an operator, or the empty string for a function."""
    return node.target.name() if isinstance(node.target, OpOverload) else ""


def read_call(node: fx.Node, declared: Stateful) -> ScanCall:
    """Read a call of a declared operator or its backward; raise an error if its arguments are not supported."""
    arguments, users_by_result = bound_arguments(node), results_in_use(node)
    if users_by_result is None:
        raise NotStatefulError(TOGETHER)
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)) and any(isinstance(item, fx.Node) for item in value):
            raise NotStatefulError(LISTS)
        if isinstance(value, fx.Node) and not is_tensor(value) and name not in declared.counts:
            raise NotStatefulError(SIZES.format(name=name))
    return ScanCall(node, {name: strip_aliases(value) for name, value in arguments.items()}, users_by_result, node.meta[VALUE])


def strip_aliases(value: Any) -> Any:
    """Return the value that an argument is an alias of: autograd may save an alias instead of the argument."""
    while isinstance(value, fx.Node) and value.target in remove_alias.targets:
        value = node_argument(value)
    return value


def users_through_aliases(value: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a value and of its aliases."""
    for user in value.users:
        if user.target in remove_alias.targets:
            yield from users_through_aliases(user)
        else:
            yield user


def backwards_of(declared: Stateful, call: ScanCall) -> list[ScanCall]:
    """Return the backwards of a call: they take its operands and the results that it saved for them."""
    backwards = [backward for backward in _calls_sharing_operands(call, declared, 1) if _is_backward_of(declared, backward, call)]
    for backward in backwards:
        _check_names(declared, backward, backward=True)
        for other in _calls_sharing_operands(call, declared, 0):
            if other.arguments != call.arguments and _is_backward_of(declared, backward, other):
                raise NotStatefulError(OTHERS)
    return backwards


def _calls_sharing_operands(call: ScanCall, declared: Stateful, index: int) -> Iterator[ScanCall]:
    """Yield the calls of the operator (0), or of its backward (1), that share an operand with this call."""
    sources = [value for value in call.arguments.values() if isinstance(value, fx.Node)]
    users = {
        user: None for source in sources for user in users_through_aliases(source) if name_of(user) == declared.operators[index]
    }
    return (read_call(user, declared) for user in users)


def _is_backward_of(declared: Stateful, backward: ScanCall, call: ScanCall) -> bool:
    """Return whether a backward has the operands of a call, and reads the results that this call saved."""
    shared_arguments = {
        name: value
        for name, value in backward.arguments.items()
        if name in declared.argument_names and name not in declared.counts
    }
    has_equal_operands = all(_are_equal_arguments(value, call.arguments[name]) for name, value in shared_arguments.items())
    saved = {name: call.users_by_result.get(number, ()) for name, number in declared.saved.items()}
    return has_equal_operands and all(backward.arguments[name] in users for name, users in saved.items())


def _check_names(declared: Stateful, call: ScanCall, backward: bool = False) -> None:
    """Check the argument names: a package's operator may change between versions."""
    expected = declared.backward_argument_names if backward else declared.argument_names
    if tuple(call.arguments) != expected:
        raise NotStatefulError(f"other arguments than {', '.join(expected)}")


def _are_equal_arguments(value: Any, expected: Any) -> bool:
    """Return whether two arguments are one node, or equal constants of one type."""
    return value is expected or (type(value) is type(expected) and not isinstance(value, fx.Node) and bool(value == expected))


# -- writing recurrences


def emit_recurrences(
    declared: Stateful, call: ScanCall, backwards: Sequence[ScanCall], writer: GraphWriter
) -> dict[fx.Node, fx.Node]:
    """Replace the results of a call and of its backwards by recurrences that run chunk by chunk.

    If one of them cannot be replaced, raise an error before anything is written.
    """
    _check_saved(declared, call, backwards)
    computed_results = [number for number in sorted(call.users_by_result) if number not in declared.recomputed_per_chunk.values()]
    plan, results = writer.run_on_fakes(forward_plan, declared, call.values, computed_results)
    _check_results(call, results, computed_results)
    backward_plans = [(backward, _backward_plan(declared, plan, call, backward, results, writer)) for backward in backwards]
    forward = writer.call(Forward(plan), *call.operands(plan.operands))
    replacements = _map_results(call, plan, forward, writer)
    for backward, plan_of_backward in backward_plans:
        merged = ScanCall(backward.node, {**call.arguments, **backward.arguments}, backward.users_by_result, backward.results)
        result = writer.before(backward.node).call(Backward(plan_of_backward), *merged.operands(plan_of_backward.operands))
        result.meta[FORWARD_OPERATOR] = forward
        replacements |= _map_results(backward, plan_of_backward, result, writer)
    return replacements


def _backward_plan(
    declared: Stateful,
    plan: StatefulPlan,
    call: ScanCall,
    backward: ScanCall,
    results_of_call: Sequence[Any],
    writer: GraphWriter,
) -> StatefulPlan:
    """Return the plan of a backward, which also takes the call's operands if it recomputes values that the call saved."""
    backward_values = {name: value for name, value in backward.values.items() if name not in declared.recomputed_per_chunk}
    recomputes = any(0 not in shape_of(results_of_call[number]) for number in declared.recomputed_per_chunk.values())
    arguments = {**(call.values if recomputes else {}), **backward_values}
    plan_of_backward, results = writer.run_on_fakes(
        backward_plan, declared, plan, arguments, results_of_call, sorted(backward.users_by_result)
    )
    _check_results(backward, results, sorted(backward.users_by_result))
    return plan_of_backward


def _map_results(call: ScanCall, plan: StatefulPlan, recurrence: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Emit a `getitem` for each result of a recurrence, and map the old results to them."""
    getitem_by_number = {
        result.index: writer.call(operator.getitem, recurrence, position) for position, result in enumerate(plan.results)
    }
    return {
        user: getitem_by_number[number]
        for number, users in call.users_by_result.items()
        if number in getitem_by_number
        for user in users
    }


def _check_saved(declared: Stateful, call: ScanCall, backwards: Sequence[ScanCall]) -> None:
    """Check that a result without rows is recomputed by each chunk, and that only this call's backwards read it."""
    backward_nodes = {backward.node for backward in backwards}
    for number, getitems in call.users_by_result.items():
        without_rows = declared.results[number] is None and number not in declared.states.values()
        if without_rows and (
            number not in declared.recomputed_per_chunk.values()
            or {user for part in getitems for user in users_through_aliases(part)} - backward_nodes
        ):
            raise NotStatefulError(SAVED.format(number=number))


def _check_results(call: ScanCall, results: Sequence[Any], numbers: Sequence[int]) -> None:
    """Check that used results keep their shape and dtype: an operator may return other results if it also returns its
    state.
    """
    for number in numbers:
        value, recurrence_value = call.results[number], results[number]
        if recurrence_value is None or shape_of(value) != shape_of(recurrence_value) or value.dtype != recurrence_value.dtype:
            raise NotStatefulError(FLAGS.format(number=number))
