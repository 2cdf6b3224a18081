"""Replace `associative_scan` operators by recurrences (`streamfx/frontend/associative_scan_match.py` recognizes them)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.ir.joint import shape_of_node
from streamfx.ir.recurrence import TreePlan, axes_apart
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import FORWARD_OPERATOR, VALUE
from streamfx.passes.rewrite.pattern import equation, results_in_use
from streamfx.passes.rewrite.scans.custom_scan import strip_aliases, users_through_aliases
from streamfx.runtime.associative import SCAN_BACKWARD, TREE_SCAN, Associative, AssociativeBackward, bytes_of_blocks


@dataclass(frozen=True)
class TreeScan:
    """A call of the scan: the rows of each leaf, the operands that all rows share, and the number of the combine function."""

    rows: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    combine: int

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> TreeScan:
        rows, given, combine = arguments
        return cls(tuple(map(strip_aliases, rows)), tuple(map(strip_aliases, given)), combine)


@equation(TREE_SCAN)
def rows_of_a_tree(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """associative_scan(rows) -> y                     ->   recurrence(rows) -> y
    associative_scan_backward(dy, rows) -> drows    ->   recurrence(dy, rows) -> drows, in reverse
    """
    call, parts = TreeScan.read(node.args), results_in_use(node)
    backwards = list(_backwards(call))
    of_backwards = [results_in_use(each) for each in backwards]
    if parts is None or None in of_backwards or not isinstance(shape_of_node(call.rows[0])[0], int):
        return None
    forward = writer.made_as(_values(node, parts), Associative(_plan(call, sorted(parts))), *call.rows, *call.given)
    found = _getitems(forward, parts, writer)
    for each, own in zip(backwards, of_backwards, strict=True):
        assert own is not None
        gradients: Sequence[Any] = each.args[0]  # type: ignore[assignment]
        present = [gradient for gradient in gradients if gradient is not None]
        absent = frozenset(number for number, gradient in enumerate(gradients) if gradient is None)
        plan = _plan(call, sorted(own), present, absent)
        operands = (*present, *call.rows, *call.given)
        result = writer.before(each).made_as(_values(each, own), AssociativeBackward(plan), *operands)
        result.meta[FORWARD_OPERATOR] = forward
        found |= _getitems(result, own, writer)
    return found


def _backwards(call: TreeScan) -> Iterator[fx.Node]:
    """Yield the backwards of a call: they take the same rows and the same combine function."""
    for user in dict.fromkeys(user for row in call.rows for user in users_through_aliases(row)):
        if user.target is SCAN_BACKWARD and TreeScan.read(user.args[1:]) == call:
            yield user


def _values(node: fx.Node, parts: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(node.meta[VALUE][number] for number in sorted(parts))


def _getitems(scan: fx.Node, parts: Mapping[int, Sequence[fx.Node]], writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    taken = {number: writer.call(operator.getitem, scan, place) for place, number in enumerate(sorted(parts))}
    return {user: taken[number] for number, users in parts.items() for user in users}


def _plan(
    call: TreeScan, results: Sequence[int], gradients: Sequence[fx.Node] = (), absent: frozenset[int] | None = None
) -> TreePlan:
    """Return the plan of a call, or of its backward."""
    operands = [*((shape_of_node(row), 0) for row in call.rows), *((shape_of_node(value), None) for value in call.given)]
    taken = [*((shape_of_node(gradient), 0) for gradient in gradients), *operands]
    axes = axes_apart(taken, [operands[number] for number in results])
    types = tuple(row.meta[VALUE].dtype for row in call.rows)
    (length, *_), *_ = shapes = [shape_of_node(row) for row in call.rows]
    assert isinstance(length, int)
    return TreePlan(
        name=f"associative_scan{'' if absent is None else '_backward'}_{call.combine:x}"[:40],
        combine=call.combine,
        types=types,
        length=length,
        carried=bytes_of_blocks([shape[1:] for shape in shapes], types, length),
        results=tuple(results),
        axes=axes,
        absent=absent or frozenset(),
    )
