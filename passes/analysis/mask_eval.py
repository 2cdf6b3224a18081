"""Evaluate one operator on one interval of delta, given one fact about each operand.

delta = key position - query position. A fact about a value with rows and keys is the `Range` [low, high] of its elements, or
a `Slope`: factor * delta + offset. Ranges follow the table of transfer functions (`passes/ops/ranges/`). They cannot express
how an integer that grows with delta compares with a constant; such a comparison splits the interval: its result is `Pieces`,
a fact per interval of delta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind
from streamfx.ir.piecewise import Fact, Pieces, Slope, absolute_value, compare_slope, constant_pieces
from streamfx.ir.ranges import MAX_ROWS, Range, cast_range, is_exact_in
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.affine import linear_combination
from streamfx.passes.ops.ranges.transfer import computation_dtype, evaluate_transfer, range_of_argument

aten = torch.ops.aten

COMPARISONS = {
    getattr(getattr(aten, name), overload): name
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class Intervals:
    """Evaluates operators on one interval, with delta in [-reach, reach].

    `reader` returns the range of a value over all rows and keys.
    """

    def __init__(self, reach: int, reader: Callable[[fx.Node], Range]) -> None:
        self._reach, self._reader = reach, reader

    def range(self, fact: Fact) -> Range:
        """Return the range of a fact for delta in [-reach, reach]."""
        return fact.range_within(self._reach) if isinstance(fact, Slope) else fact

    def evaluate(self, node: fx.Node, facts: Mapping[fx.Node, Fact], result: int = 0) -> Pieces:
        """Return the facts about result number `result` of an operator that is elementwise, or reduces neither rows nor keys.

        `facts` has a fact about some operands, which holds on one interval of delta; for others, `reader` has the range.
        """
        if any(isinstance(fact, Slope) for fact in facts.values()):
            pieces = self._evaluate_slopes(node, facts)
            if pieces is not None:
                return pieces
        ranges = {operand: self.range(fact) for operand, fact in facts.items()}
        return constant_pieces(
            evaluate_transfer(node, lambda operand: ranges[operand] if operand in ranges else self._reader(operand))[result]
        )

    def compare(self, node: fx.Node, slope: Slope, value: Range, relation: str) -> Pieces | None:
        """Return where `slope <relation> value` holds, as truth values per interval of delta; `relation` is "lt", "le" ...

        None if the value is not one number, or if the dtype of the comparison rounds the slope.
        """
        dtype = computation_dtype(node, bound_arguments(node))
        number = None if dtype is None else cast_range(value, dtype).constant
        if number is None or dtype is None or not self.is_exact(slope, dtype):
            return None
        return compare_slope(relation, slope, number)

    def is_exact(self, slope: Slope, dtype: torch.dtype) -> bool:
        """Return whether a dtype represents all numbers of a slope, for delta in [-reach, reach], exactly."""
        slope_range = slope.range_within(self._reach)
        return is_exact_in(dtype, slope_range.low, slope_range.high)

    def if_exact(self, slope: Slope, node: fx.Node) -> Pieces | None:
        """Return a slope as the fact about a node's result for every delta; None if the result's dtype would round it."""
        return constant_pieces(slope) if self.is_exact(slope, node.meta[VALUE].dtype) else None

    def _evaluate_slopes(self, node: fx.Node, facts: Mapping[fx.Node, Fact]) -> Pieces | None:
        """Evaluate a comparison, copy, negation, absolute value or linear combination of slopes; None for others."""
        if node.target in COMPARISONS:
            return self._compare_operands(node, facts)
        operand_fact = facts[node.args[0]] if node.args and node.args[0] in facts else None  # type: ignore[index]
        if is_kind(node, Kind.CAST, Kind.COPY, Kind.ALIAS) and isinstance(operand_fact, Slope):
            return self.if_exact(operand_fact, node)
        if node.target is aten.neg.default and isinstance(operand_fact, Slope):
            return self.if_exact(operand_fact.times(-1), node)
        if node.target is aten.abs.default and isinstance(operand_fact, Slope):
            return (
                absolute_value(operand_fact)
                if not operand_fact.spread and self.is_exact(operand_fact.times(-1), node.meta[VALUE].dtype)
                else None
            )
        return self._linear_combination(node, facts)

    def _compare_operands(self, node: fx.Node, facts: Mapping[fx.Node, Fact]) -> Pieces | None:
        """Evaluate a comparison of a slope with a number, in either order; None if both operands are slopes, or neither is."""
        left, right = (self._fact(item, facts) for item in node.args[:2])
        if isinstance(left, Slope) and not isinstance(right, Slope):
            return self.compare(node, left, right, COMPARISONS[node.target])
        if isinstance(right, Slope) and not isinstance(left, Slope):
            return self.compare(node, right, left, MIRRORED[COMPARISONS[node.target]])
        return None

    def _linear_combination(self, node: fx.Node, facts: Mapping[fx.Node, Fact]) -> Pieces | None:
        """Evaluate a * x + b * y for slopes or constant integers x and y; None for other operators, or if a dtype rounds."""
        terms, dtype = linear_combination(node), node.meta[VALUE].dtype
        if terms is None:
            return None
        result = Slope(0, 0)
        for coefficient, item in terms:
            fact = self._fact(item, facts)
            slope = fact if isinstance(fact, Slope) else _constant_slope(fact)
            if slope is None or not self.is_exact(slope, dtype) or not is_exact_in(dtype, coefficient, coefficient):
                return None
            result = result.plus(slope.times(coefficient))
        return self.if_exact(result, node)

    def _fact(self, item: object, facts: Mapping[fx.Node, Fact]) -> Fact:
        """Return the fact about an argument: from `facts`, or its range over all positions."""
        if is_tensor(item) and item in facts:
            return facts[item]  # type: ignore[index]
        return range_of_argument(item, self._reader)


def _constant_slope(value_range: Range) -> Slope | None:
    """Return an integer as a slope with factor zero; None if the range is not a single integer."""
    number = value_range.constant
    return Slope(0, int(number)) if number is not None and abs(number) < float("inf") and number == int(number) else None


def reach_of(axes: AxisFacts) -> int:
    """Return the maximum distance between a key position and a query position, with paddings; 2^31 - 1 if dynamic."""
    if axes.sequence is None:
        return MAX_ROWS
    ends = [(offset, offset + length) for offset, length in axes.sequence.members.values()]
    bounds = [bound for pair in ends for bound in pair]
    if not all(isinstance(bound, int) for bound in bounds):
        return MAX_ROWS
    return max(bounds) - min(bounds)


def keeps_last_two_dims(node: fx.Node, source: fx.Node) -> bool:
    """Return whether `node` is a view or copy of `source` with each row and column of the last two dimensions at its index."""
    rank, source_rank = len(shape_of_node(node)), len(shape_of_node(source))
    arguments = bound_arguments(node)
    if node.target is aten.slice.Tensor:
        from_first = arguments["start"] in (None, 0) and arguments["step"] == 1
        return from_first or arguments["dim"] % rank < rank - 2
    if node.target is aten.select.int:
        return bool(arguments["dim"] % source_rank < source_rank - 2)
    if node.target is aten.unsqueeze.default:
        return bool(arguments["dim"] % rank < rank - 2)
    if node.target is aten.expand.default:  # a single row or column may be broadcast
        return shape_of_node(node)[-2:] == shape_of_node(source)[-2:]
    return is_kind(node, Kind.ALIAS, Kind.COPY)
