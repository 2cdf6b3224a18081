"""Replace `associative_scan` operators by recurrences (`streamfx/frontend/associative_scan_match.py` recognizes them)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.joint import shape_of_node
from streamfx.ir.recurrence import TreePlan, separate_axes
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import FORWARD_OPERATOR, VALUE
from streamfx.passes.rewrite.pattern import getitems_by_index, rewrite_rule
from streamfx.passes.rewrite.scans.custom_scan import strip_aliases, users_through_aliases
from streamfx.runtime.associative import SCAN_BACKWARD, TREE_SCAN, Associative, AssociativeBackward, bytes_of_blocks


@dataclass(frozen=True)
class TreeScan:
    """A call of `associative_scan`: the rows of each leaf, the operands that all rows share, the combine function's id."""

    rows: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]
    combine: int

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> TreeScan:
        """Return a call from its arguments."""
        rows, shared, combine = arguments
        return cls(tuple(map(strip_aliases, rows)), tuple(map(strip_aliases, shared)), combine)


@rewrite_rule(TREE_SCAN)
def associative_scan_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """associative_scan(rows) -> y                     ->   recurrence(rows) -> y
    associative_scan_backward(dy, rows) -> drows    ->   recurrence(dy, rows) -> drows, in reverse
    """
    call, users_by_result = TreeScan.read(node.args), getitems_by_index(node)
    backwards = list(_backward_calls(call))
    users_by_backward = [getitems_by_index(backward) for backward in backwards]
    if users_by_result is None or None in users_by_backward or not isinstance(shape_of_node(call.rows[0])[0], int):
        return None
    forward = writer.insert_call(
        _result_values(node, users_by_result), Associative(_plan(call, sorted(users_by_result))), *call.rows, *call.shared
    )
    replacements = _getitems(forward, users_by_result, writer)
    for backward, backward_users in zip(backwards, users_by_backward, strict=True):
        assert backward_users is not None
        gradients: Sequence[Any] = backward.args[0]  # type: ignore[assignment]
        present = [gradient for gradient in gradients if gradient is not None]
        absent_gradients = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)
        plan = _plan(call, sorted(backward_users), present, absent_gradients)
        operands = (*present, *call.rows, *call.shared)
        result = writer.before(backward).insert_call(
            _result_values(backward, backward_users), AssociativeBackward(plan), *operands
        )
        result.meta[FORWARD_OPERATOR] = forward
        replacements |= _getitems(result, backward_users, writer)
    return replacements


def _backward_calls(call: TreeScan) -> Iterator[fx.Node]:
    """Yield the backwards of a call: they have the same rows, shared operands and combine function."""
    for user in dict.fromkeys(user for row in call.rows for user in users_through_aliases(row)):
        if user.target is SCAN_BACKWARD and TreeScan.read(user.args[1:]) == call:
            yield user


def _result_values(node: fx.Node, users_by_result: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return the traced values of the used results of a scan, in order."""
    return tuple(node.meta[VALUE][index] for index in sorted(users_by_result))


def _getitems(scan: fx.Node, users_by_result: Mapping[int, Sequence[fx.Node]], writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Emit a `getitem` for each used result, and map the old `getitem` nodes to it."""
    getitem_by_index = {index: writer.call(operator.getitem, scan, i) for i, index in enumerate(sorted(users_by_result))}
    return {user: getitem_by_index[index] for index, users in users_by_result.items() for user in users}


def _plan(
    call: TreeScan, results: Sequence[int], gradients: Sequence[fx.Node] = (), absent: frozenset[int] | None = None
) -> TreePlan:
    """Return the plan of a call with these used results, or of its backward if `absent` (gradients that are None) is given."""
    operands = [*((shape_of_node(row), 0) for row in call.rows), *((shape_of_node(value), None) for value in call.shared)]
    all_operands = [*((shape_of_node(gradient), 0) for gradient in gradients), *operands]
    axes = separate_axes(all_operands, [operands[index] for index in results])
    dtypes = tuple(row.meta[VALUE].dtype for row in call.rows)
    (length, *_), *_ = shapes = [shape_of_node(row) for row in call.rows]
    assert isinstance(length, int)
    return TreePlan(
        name=f"associative_scan{'' if absent is None else '_backward'}_{call.combine:x}"[:40],
        combine=call.combine,
        dtypes=dtypes,
        length=length,
        carry_size=bytes_of_blocks([shape[1:] for shape in shapes], dtypes, length),
        results=tuple(results),
        axes=axes,
        absent_gradients=absent or frozenset(),
    )
