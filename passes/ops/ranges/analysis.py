"""The ranges of a graph's values, computed on demand."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_tensor, results_of
from streamfx.ir.piecewise import Pieces, hull_of
from streamfx.ir.ranges import MAX_ROWS, Range, activation, full_range
from streamfx.node_meta import PATTERN, VALUE
from streamfx.passes.ops.ranges.products import unpacked_product
from streamfx.passes.ops.ranges.transfer import evaluate_transfer
from streamfx.torch_private import OpOverload
from streamfx.torch_private.graph_nodes import operands_of


class ValueRanges:
    """The ranges [low, high] of the elements of a graph's values, computed on demand.

    `trained`: inputs with a gradient, and tangents; their elements are assumed to be ordinary numbers (at most 1e6).
    """

    def __init__(self, trained: Collection[fx.Node] = ()) -> None:
        self._trained = frozenset(trained)
        self._range_of: dict[fx.Node, tuple[Range, ...]] = {}

    def of(self, node: fx.Node) -> Range:
        """Return the range of a tensor's elements (of a tuple: of its first item); operands' ranges are computed before.

        The loop replaces a recursion, which deep graphs would overflow. An operator with no known result has the full range.
        """
        todo = [node]
        while todo:
            value = todo[-1]
            missing_operands = [operand for operand in operands_of(value) if operand not in self._range_of]
            if missing_operands and value not in self._range_of:
                todo.extend(missing_operands)
                continue
            todo.pop()
            if value not in self._range_of:
                self._range_of[value] = self._compute(value) or (full_range(torch.float64),)
        return self._range_of[node][0]

    def note(self, node: fx.Node, value_range: Range) -> None:
        """Record a tighter range of a value, which another analysis has found from facts about query and key positions."""
        self._range_of[node] = (value_range,)

    def _compute(self, node: fx.Node) -> tuple[Range, ...]:
        """Return the ranges of a node's results; of a graph input, its only range: zero if it is not a tensor."""
        if node.op == "call_function":
            return self._range_of_results(node)
        return (self._range_of_input(node) if is_tensor(node) else Range(0, 0),)

    def _range_of_results(self, node: fx.Node) -> tuple[Range, ...]:
        """Return the ranges of an operator's results from the ranges of its operands, which are already computed."""
        if node.target is operator.getitem:
            results, result_index = self._range_of[node.args[0]], node.args[1]  # type: ignore[index]
            if isinstance(result_index, int) and result_index < len(results):
                return (results[result_index],)
        if not isinstance(node.target, OpOverload):
            return tuple(full_range(torch.float64 if result is None else result.dtype) for result in results_of(node))
        unpacked = unpacked_product(node, self._operand)
        return evaluate_transfer(node, self._operand) if unpacked is None else (unpacked,)

    def _operand(self, node: fx.Node) -> Range:
        """Return the range, already computed, of an operand (of a tuple: of its first item)."""
        return self._range_of[node][0]

    def _range_of_input(self, node: fx.Node) -> Range:
        """Return the range of a graph input that is a tensor.

        The hull of its elements, if metadata describes them as a function of (key - query) position (`PATTERN`); that of an
        ordinary number, if it is trained; else the full range of its dtype.
        """
        dtype: torch.dtype = node.meta[VALUE].dtype
        pattern: Any = node.meta.get(PATTERN)
        if isinstance(pattern, Pieces):
            return hull_of(pattern, MAX_ROWS)
        return activation(dtype) if node in self._trained else full_range(dtype)
