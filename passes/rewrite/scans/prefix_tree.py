"""Replace `associative_scan` operators by recurrences (`streamfx/frontend/associative_scan_match.py` recognizes them).

An associative scan combines the rows so far by a function, which maps two tuples of tensors (the *leaves*) to one, as
`cumsum` does by addition. A recurrence is one operator that a loop runs chunk by chunk, with a carry from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from streamfx.dialect.associative_scan import SCAN_BACKWARD, TREE_SCAN
from streamfx.ir.joint import shape_of_node
from streamfx.ir.recurrence import TreePlan, separate_axes
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import FORWARD_OPERATOR, VALUE
from streamfx.passes.rewrite.pattern import getitems_by_index, rewrite_rule
from streamfx.passes.rewrite.scans.custom_scan import emit_getitems, strip_aliases, users_through_aliases
from streamfx.runtime.associative import Associative, AssociativeBackward, bytes_of_blocks


@dataclass(frozen=True)
class TreeScan:
    """A call of `associative_scan`."""

    rows: tuple[fx.Node, ...]  # of each leaf, with the rows along dimension 0
    shared: tuple[fx.Node, ...]  # operands of the combine function that all rows share
    combine: int  # the number of the combine function (index into `runtime/associative.py: COMBINES`)

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> TreeScan:
        """Return a call from its arguments (rows, shared operands, number of the combine function), without aliases."""
        rows, shared, combine = arguments
        return cls(tuple(map(strip_aliases, rows)), tuple(map(strip_aliases, shared)), combine)


@rewrite_rule(TREE_SCAN)
def associative_scan_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """associative_scan(rows) -> y                     ->   recurrence(rows) -> y
    associative_scan_backward(dy, rows) -> drows    ->   recurrence(dy, rows) -> drows, in reverse
    """
    call, results = TreeScan.read(node.args), getitems_by_index(node)
    backwards = list(_backward_calls(call))
    results_by_backward = [getitems_by_index(backward) for backward in backwards]
    if results is None or None in results_by_backward or not isinstance(shape_of_node(call.rows[0])[0], int):
        return None
    plan = _plan(call, sorted(results))
    forward = writer.insert_call(_result_values(node, results), Associative(plan), *call.rows, *call.shared)
    replacements = emit_getitems(results, sorted(results), forward, writer)
    for backward, backward_results in zip(backwards, results_by_backward, strict=True):
        assert backward_results is not None
        gradients: Sequence[Any] = backward.args[0]  # type: ignore[assignment]
        present = [gradient for gradient in gradients if gradient is not None]
        absent_gradients = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)
        plan = _plan(call, sorted(backward_results), present, absent_gradients)
        operands = (*present, *call.rows, *call.shared)
        new_backward = writer.move_before(backward).insert_call(
            _result_values(backward, backward_results), AssociativeBackward(plan), *operands
        )
        new_backward.meta[FORWARD_OPERATOR] = forward
        replacements |= emit_getitems(backward_results, sorted(backward_results), new_backward, writer)
    return replacements


def _backward_calls(call: TreeScan) -> Iterator[fx.Node]:
    """Yield the backward nodes of a call: they read the same rows, shared operands and combine function."""
    for user in dict.fromkeys(user for row in call.rows for user in users_through_aliases(row)):
        if user.target is SCAN_BACKWARD and TreeScan.read(user.args[1:]) == call:
            yield user


def _result_values(node: fx.Node, results: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return the traced values (fake tensors) of the results of `node` whose indices are keys of `results`, in order."""
    return tuple(node.meta[VALUE][index] for index in sorted(results))


def _plan(
    call: TreeScan, results: Sequence[int], gradients: Sequence[fx.Node] = (), absent: frozenset[int] | None = None
) -> TreePlan:
    """Return the plan of a call with the results of these indices, or of its backward.

    A backward has incoming gradients; `absent` has the indices of those that are None. It is None for a forward call.
    """
    # (shape, dimension of the rows), which is None for operands that all rows share
    operands = [*((shape_of_node(row), 0) for row in call.rows), *((shape_of_node(value), None) for value in call.shared)]
    all_operands = [*((shape_of_node(gradient), 0) for gradient in gradients), *operands]
    axes = separate_axes(all_operands, [operands[index] for index in results])
    dtypes = tuple(row.meta[VALUE].dtype for row in call.rows)
    shapes = [shape_of_node(row) for row in call.rows]
    length = shapes[0][0]
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
