"""Replace operators with a state that packages or users declare (`streamfx.register_recurrence`) by recurrences.

A declaration (`Stateful`) names the operator and its backward, the functions that run them on one chunk of rows, and the
arguments and results that have rows or are states. A recurrence is one operator that a loop runs chunk by chunk; a *plan*
is its description. A call and its backwards are replaced together: the loop that runs the call also stores the state at the
start of each chunk, which the backward needs. `NotStatefulError` says why a call is not replaced; the rule records this
reason as its `FALLBACK_REASON`.
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
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.rules.stateful import STATEFUL
from streamfx.passes.ops.traits import overload_name
from streamfx.passes.rewrite.pattern import RewriteRule, getitems_by_index
from streamfx.passes.rewrite.views.no_ops import remove_alias
from streamfx.runtime.custom_scan import StatefulRecurrence

UNPACKED_RESULTS = "results that are used as one tuple"
TENSOR_LIST = "a list of tensors"
DYNAMIC_SIZE = "argument {name}, a size that changes from call to call"
SHARED_RESULT = "result {index} in use by more than the operator's own backward"
AMBIGUOUS_BACKWARD = "a backward that may belong to another call, with other arguments"
ABOVE_ZERO = "{name} that may be above zero: clamp(max=0) proves that they are not"
CHANGED_RESULT = "result {index} in use, which changes if the state after the last row is returned as well"


@dataclass(frozen=True)
class ScanCall:
    """A call of an operator with a state, or of its backward."""

    node: fx.Node
    arguments: Mapping[str, Any]  # by name
    getitems: Mapping[int, Sequence[fx.Node]]  # the `getitem` nodes of each result, by result index
    results: Sequence[Any]  # the traced results (fake tensors)

    @property
    def values(self) -> dict[str, Any]:
        """Return the traced values of the arguments: fake tensors instead of nodes."""
        return {name: value.meta[VALUE] if isinstance(value, fx.Node) else value for name, value in self.arguments.items()}

    def operands(self, names: Sequence[str]) -> list[fx.Node]:
        """Return the arguments with these names, in the given order; they are tensors."""
        return [self.arguments[name] for name in names]


def stateful_operator_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """scan(x, first) -> y, last                       ->   recurrence(x, first) -> y, last
    scan_backward(dy, dlast, x, first) -> dx, dfirst   ->   recurrence(dy, dlast, x, first) -> dx, dfirst, in reverse

    Applies if the call is one that its declaration allows.
    """
    declared = STATEFUL[overload_name(node.target)]
    backwards: list[ScanCall] = []
    try:
        call = read_call(node, declared)
        _check_names(declared, call)
        backwards += find_backwards(declared, call)
        _check_nonpositive(declared, call)
        return emit_recurrences(declared, call, backwards, writer)
    except NotStatefulError as why:
        for call_node in (node, *(backward.node for backward in backwards)):
            call_node.meta[FALLBACK_REASON] = f"{call_node.target} with {why}"
        return None


STATEFUL_OPERATOR_TO_RECURRENCE = RewriteRule("stateful_operator_to_recurrence", STATEFUL.keys(), stateful_operator_to_recurrence)


# -- reading calls


def read_call(node: fx.Node, declared: Stateful) -> ScanCall:
    """Return a call of a declared operator or its backward.

    Raise a NotStatefulError if an argument is a list of tensors or a dynamic size (other than a number of rows), or if the
    results are used as one tuple.
    """
    arguments, getitems = bound_arguments(node), getitems_by_index(node)
    if getitems is None:
        raise NotStatefulError(UNPACKED_RESULTS)
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)) and any(isinstance(item, fx.Node) for item in value):
            raise NotStatefulError(TENSOR_LIST)
        if isinstance(value, fx.Node) and not is_tensor(value) and name not in declared.counts:
            raise NotStatefulError(DYNAMIC_SIZE.format(name=name))
    return ScanCall(node, {name: strip_aliases(value) for name, value in arguments.items()}, getitems, node.meta[VALUE])


def strip_aliases(value: Any) -> Any:
    """Return the value before `alias` and `detach`; anything but a node unchanged.

    Autograd may save an alias of an argument for the backward, instead of the argument.
    """
    while isinstance(value, fx.Node) and value.target in remove_alias.targets:
        value = node_argument(value)
    return value


def users_through_aliases(value: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a value and of its aliases (`alias`, `detach`), without the aliases themselves."""
    for user in value.users:
        if user.target in remove_alias.targets:
            yield from users_through_aliases(user)
        else:
            yield user


def find_backwards(declared: Stateful, call: ScanCall) -> list[ScanCall]:
    """Return the backward calls of a call: they read its operands and the results that it saved for them.

    Raise a NotStatefulError if a backward may also belong to another call, with other arguments.
    """
    forward_name, backward_name = declared.operators
    candidates = _calls_sharing_operands(call, declared, backward_name)
    backwards = [backward for backward in candidates if _is_backward_of(declared, backward, call)]
    for backward in backwards:
        _check_names(declared, backward, backward=True)
        for other_call in _calls_sharing_operands(call, declared, forward_name):
            if other_call.arguments != call.arguments and _is_backward_of(declared, backward, other_call):
                raise NotStatefulError(AMBIGUOUS_BACKWARD)
    return backwards


def _calls_sharing_operands(call: ScanCall, declared: Stateful, operator_name: str) -> Iterator[ScanCall]:
    """Yield all calls of the operator with this name (the declared operator or its backward) that read an operand of `call`."""
    operands = [value for value in call.arguments.values() if isinstance(value, fx.Node)]
    users = {
        user: None
        for operand in operands
        for user in users_through_aliases(operand)
        if overload_name(user.target) == operator_name
    }
    return (read_call(user, declared) for user in users)


def _is_backward_of(declared: Stateful, backward: ScanCall, call: ScanCall) -> bool:
    """Return whether a backward call has the arguments of a forward call, and reads the results that this call saved.

    Arguments are compared by name. A number of rows (`declared.counts`) is not compared.
    """
    shared_arguments = {
        name: value
        for name, value in backward.arguments.items()
        if name in declared.argument_names and name not in declared.counts
    }
    has_equal_operands = all(_are_equal_arguments(value, call.arguments[name]) for name, value in shared_arguments.items())
    saved_getitems = {name: call.getitems.get(index, ()) for name, index in declared.saved.items()}
    return has_equal_operands and all(backward.arguments[name] in getitems for name, getitems in saved_getitems.items())


def _check_names(declared: Stateful, call: ScanCall, backward: bool = False) -> None:
    """Raise a NotStatefulError if a call's argument names differ from the declaration's.

    They differ if another version of a package has changed its operator. `backward`: the call is one of the backward.
    """
    expected = declared.backward_argument_names if backward else declared.argument_names
    if tuple(call.arguments) != expected:
        raise NotStatefulError(f"other arguments than {', '.join(expected)}")


def _check_nonpositive(declared: Stateful, call: ScanCall) -> None:
    """Raise a NotStatefulError if an argument may be above zero, although the declaration does not allow it."""
    for name in declared.nonpositive:
        if ValueRanges().of(call.arguments[name]).high > 0:
            raise NotStatefulError(ABOVE_ZERO.format(name=name))


def _are_equal_arguments(value: Any, expected: Any) -> bool:
    """Return whether two arguments are one node, or equal constants of one type."""
    return value is expected or (type(value) is type(expected) and not isinstance(value, fx.Node) and bool(value == expected))


# -- writing recurrences


def emit_recurrences(
    declared: Stateful, call: ScanCall, backwards: Sequence[ScanCall], writer: GraphWriter
) -> dict[fx.Node, fx.Node]:
    """Emit recurrences that run a call and its backwards chunk by chunk; return {old getitem: new getitem}.

    If one of the calls cannot be replaced, raise a NotStatefulError before anything is written. Results that the backward
    recomputes for each chunk are not results of the recurrence.
    """
    _check_saved(declared, call, backwards)
    computed_results = [index for index in sorted(call.getitems) if index not in declared.recomputed_per_chunk.values()]
    plan, results = writer.run_on_fakes(forward_plan, declared, call.values, computed_results)
    _check_results(call, results, computed_results)
    plans = [(backward, _plan_backward(declared, plan, call, backward, results, writer)) for backward in backwards]
    forward = writer.call(StatefulRecurrence(plan), *call.operands(plan.operands))
    replacements = emit_getitems(call.getitems, computed_results, forward, writer)
    for backward, backward_call_plan in plans:
        # a backward that recomputes saved results also reads the forward call's operands
        all_arguments = {**call.arguments, **backward.arguments}
        operands = [all_arguments[name] for name in backward_call_plan.operands]
        new_backward = writer.move_before(backward.node).call(StatefulRecurrence(backward_call_plan), *operands)
        new_backward.meta[FORWARD_OPERATOR] = forward
        replacements |= emit_getitems(backward.getitems, sorted(backward.getitems), new_backward, writer)
    return replacements


def _plan_backward(
    declared: Stateful,
    call_plan: StatefulPlan,
    call: ScanCall,
    backward: ScanCall,
    forward_results: Sequence[Any],
    writer: GraphWriter,
) -> StatefulPlan:
    """Return the plan of a backward call; raise a NotStatefulError if its results would differ from the traced ones.

    The forward call saves some of its results for the backward. Those without a dimension of rows are recomputed for each
    chunk; if any of them has elements, the backward also reads the forward call's operands. `call_plan` is the plan of the
    forward call, `forward_results` its results as fake tensors.
    """
    backward_values = {name: value for name, value in backward.values.items() if name not in declared.recomputed_per_chunk}
    recomputes = any(0 not in shape_of(forward_results[index]) for index in declared.recomputed_per_chunk.values())
    arguments = {**(call.values if recomputes else {}), **backward_values}
    used_results = sorted(backward.getitems)
    plan, results = writer.run_on_fakes(backward_plan, declared, call_plan, arguments, forward_results, used_results)
    _check_results(backward, results, used_results)
    return plan


def emit_getitems(
    getitems: Mapping[int, Sequence[fx.Node]], indices: Sequence[int], recurrence: fx.Node, writer: GraphWriter
) -> dict[fx.Node, fx.Node]:
    """Emit a `getitem` for each result of a recurrence; return {old getitem of the call: new getitem}.

    `indices`: for each result of the recurrence, its index among the results of the call; `getitems` has the old nodes by it.
    """
    replacements: dict[fx.Node, fx.Node] = {}
    for i, index in enumerate(indices):
        replacements |= dict.fromkeys(getitems[index], writer.call(operator.getitem, recurrence, i))
    return replacements


def _check_saved(declared: Stateful, call: ScanCall, backwards: Sequence[ScanCall]) -> None:
    """Raise a NotStatefulError if a result that neither has rows nor is a state is used by anything but these backwards.

    Such a result of the full sequence is not computed: the backward recomputes it for each chunk, if it is declared as
    saved.
    """
    backward_nodes = {backward.node for backward in backwards}
    for index, getitems in call.getitems.items():
        has_no_rows = declared.results[index] is None and index not in declared.states.values()
        if has_no_rows and (
            index not in declared.recomputed_per_chunk.values()
            or {user for getitem in getitems for user in users_through_aliases(getitem)} - backward_nodes
        ):
            raise NotStatefulError(SHARED_RESULT.format(index=index))


def _check_results(call: ScanCall, results: Sequence[Any], indices: Sequence[int]) -> None:
    """Raise a NotStatefulError if the shape or dtype of a result differs between the plan (`results`) and the traced call.

    `indices` are the results that are used. An operator may return other results if it also returns its state.
    """
    for index in indices:
        traced, planned = call.results[index], results[index]
        if planned is None or shape_of(traced) != shape_of(planned) or traced.dtype != planned.dtype:
            raise NotStatefulError(CHANGED_RESULT.format(index=index))
