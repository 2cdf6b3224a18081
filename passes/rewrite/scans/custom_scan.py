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
from streamfx.node_meta import FALLBACK_REASON, FORWARD_OPERATOR, VALUE
from streamfx.passes.ops.rules.stateful import STATEFUL
from streamfx.passes.ops.traits import overload_name
from streamfx.passes.rewrite.pattern import RewriteRule, getitems_by_index
from streamfx.passes.rewrite.views.no_ops import remove_alias
from streamfx.runtime.custom_scan import Backward, Forward

UNPACKED_RESULTS = "results that are used as one tuple"
TENSOR_LIST = "a list of tensors"
DYNAMIC_SIZE = "argument {name}, a size that changes from call to call"
SHARED_RESULT = "result {index} in use by more than the operator's own backward"
AMBIGUOUS_BACKWARD = "a backward that may belong to another call, with other arguments"
CHANGED_RESULT = "result {index} in use, which changes if the state after the last row is returned as well"


@dataclass(frozen=True)
class ScanCall:
    """A call of an operator with a state, or of its backward: arguments by name, users of each result, and traced results."""

    node: fx.Node
    arguments: Mapping[str, Any]
    users_by_result: Mapping[int, Sequence[fx.Node]]
    results: Sequence[Any]

    @property
    def values(self) -> dict[str, Any]:
        """Return the traced values of the arguments: fake tensors instead of nodes."""
        return {name: value.meta[VALUE] if isinstance(value, fx.Node) else value for name, value in self.arguments.items()}

    def operands(self, names: Sequence[str]) -> list[fx.Node]:
        """Return the arguments with these names."""
        return [self.arguments[name] for name in names]


def stateful_operator_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """scan(x, first) -> y, last                       ->   recurrence(x, first) -> y, last
    scan_backward(dy, dlast, x, first) -> dx, dfirst   ->   recurrence(dy, dlast, x, first) -> dx, dfirst, in reverse
    """
    declared = STATEFUL[overload_name(node.target)]
    backwards: list[ScanCall] = []
    try:
        call = read_call(node, declared)
        _check_names(declared, call)
        backwards += find_backwards(declared, call)
        return emit_recurrences(declared, call, backwards, writer)
    except NotStatefulError as why:
        for call_node in (node, *(backward.node for backward in backwards)):
            call_node.meta[FALLBACK_REASON] = f"{call_node.target} with {why}"
        return None


STATEFUL_OPERATOR_TO_RECURRENCE = RewriteRule("stateful_operator_to_recurrence", STATEFUL.keys(), stateful_operator_to_recurrence)


# -- reading calls


def read_call(node: fx.Node, declared: Stateful) -> ScanCall:
    """Return a call of a declared operator or its backward; raise a NotStatefulError if its arguments are not supported."""
    arguments, users_by_result = bound_arguments(node), getitems_by_index(node)
    if users_by_result is None:
        raise NotStatefulError(UNPACKED_RESULTS)
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)) and any(isinstance(item, fx.Node) for item in value):
            raise NotStatefulError(TENSOR_LIST)
        if isinstance(value, fx.Node) and not is_tensor(value) and name not in declared.counts:
            raise NotStatefulError(DYNAMIC_SIZE.format(name=name))
    return ScanCall(node, {name: strip_aliases(value) for name, value in arguments.items()}, users_by_result, node.meta[VALUE])


def strip_aliases(value: Any) -> Any:
    """Return the value of which an argument is an alias, because autograd may save an alias instead of the argument."""
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


def find_backwards(declared: Stateful, call: ScanCall) -> list[ScanCall]:
    """Return the backwards of a call: they read its operands and the results that it saved for them.

    Raise a NotStatefulError if a backward may belong to another call.
    """
    backwards = [backward for backward in _calls_sharing_operands(call, declared, 1) if _is_backward_of(declared, backward, call)]
    for backward in backwards:
        _check_names(declared, backward, backward=True)
        for other in _calls_sharing_operands(call, declared, 0):
            if other.arguments != call.arguments and _is_backward_of(declared, backward, other):
                raise NotStatefulError(AMBIGUOUS_BACKWARD)
    return backwards


def _calls_sharing_operands(call: ScanCall, declared: Stateful, index: int) -> Iterator[ScanCall]:
    """Yield the calls of the operator (`index` 0), or of its backward (1), that share an operand with a call."""
    sources = [value for value in call.arguments.values() if isinstance(value, fx.Node)]
    users = {
        user: None
        for source in sources
        for user in users_through_aliases(source)
        if overload_name(user.target) == declared.operators[index]
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
    saved = {name: call.users_by_result.get(index, ()) for name, index in declared.saved.items()}
    return has_equal_operands and all(backward.arguments[name] in getitems for name, getitems in saved.items())


def _check_names(declared: Stateful, call: ScanCall, backward: bool = False) -> None:
    """Raise a NotStatefulError if a call has other argument names, because a package may change its operator."""
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
    """Emit recurrences that run a call and its backwards chunk by chunk, and map the old results to theirs.

    If one of the calls cannot be replaced, raise a NotStatefulError before anything is written.
    """
    _check_saved(declared, call, backwards)
    computed_results = [index for index in sorted(call.users_by_result) if index not in declared.recomputed_per_chunk.values()]
    plan, results = writer.run_on_fakes(forward_plan, declared, call.values, computed_results)
    _check_results(call, results, computed_results)
    plans = [(backward, _plan_backward(declared, plan, call, backward, results, writer)) for backward in backwards]
    forward = writer.call(Forward(plan), *call.operands(plan.operands))
    replacements = _map_results(call, plan, forward, writer)
    for backward, backward_call_plan in plans:
        merged = ScanCall(backward.node, {**call.arguments, **backward.arguments}, backward.users_by_result, backward.results)
        result = writer.before(backward.node).call(Backward(backward_call_plan), *merged.operands(backward_call_plan.operands))
        result.meta[FORWARD_OPERATOR] = forward
        replacements |= _map_results(backward, backward_call_plan, result, writer)
    return replacements


def _plan_backward(
    declared: Stateful,
    call_plan: StatefulPlan,
    call: ScanCall,
    backward: ScanCall,
    forward_results: Sequence[Any],
    writer: GraphWriter,
) -> StatefulPlan:
    """Return the plan of a backward call, which also reads the forward call's operands if it recomputes saved results."""
    backward_values = {name: value for name, value in backward.values.items() if name not in declared.recomputed_per_chunk}
    recomputes = any(0 not in shape_of(forward_results[index]) for index in declared.recomputed_per_chunk.values())
    arguments = {**(call.values if recomputes else {}), **backward_values}
    used_results = sorted(backward.users_by_result)
    plan, results = writer.run_on_fakes(backward_plan, declared, call_plan, arguments, forward_results, used_results)
    _check_results(backward, results, used_results)
    return plan


def _map_results(call: ScanCall, plan: StatefulPlan, recurrence: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Emit a `getitem` for each result of a recurrence, and map the old `getitem` nodes to them."""
    getitem_by_index = {result.index: writer.call(operator.getitem, recurrence, i) for i, result in enumerate(plan.results)}
    return {
        old_getitem: getitem_by_index[index]
        for index, old_getitems in call.users_by_result.items()
        if index in getitem_by_index
        for old_getitem in old_getitems
    }


def _check_saved(declared: Stateful, call: ScanCall, backwards: Sequence[ScanCall]) -> None:
    """Raise a NotStatefulError unless each chunk recomputes each result without rows, and only these backwards read it."""
    backward_nodes = {backward.node for backward in backwards}
    for index, getitems in call.users_by_result.items():
        has_no_rows = declared.results[index] is None and index not in declared.states.values()
        if has_no_rows and (
            index not in declared.recomputed_per_chunk.values()
            or {user for getitem in getitems for user in users_through_aliases(getitem)} - backward_nodes
        ):
            raise NotStatefulError(SHARED_RESULT.format(index=index))


def _check_results(call: ScanCall, results: Sequence[Any], indices: Sequence[int]) -> None:
    """Raise a NotStatefulError if a used result has another shape or dtype in the plan than in the trace.

    An operator may return other results if it also returns its state.
    """
    for index in indices:
        traced, planned = call.results[index], results[index]
        if planned is None or shape_of(traced) != shape_of(planned) or traced.dtype != planned.dtype:
            raise NotStatefulError(CHANGED_RESULT.format(index=index))
