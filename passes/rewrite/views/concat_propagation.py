"""Propagate a concatenation to its users: compute each slice of a value from the same slice of its operands.

where(cat(a, b), 0, -inf)     ->   where(a, 0, -inf), where(b, 0, -inf)

The concatenated axis is divided into slices, one per operand of the `cat` (here two). A value without this axis is the same
for all slices. `axes` (`AxisFacts`) has the axes of each dimension of a value, and an axis label for each dimension of an
operator's operands and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from streamfx.ir.axis_table import AxisFactor
from streamfx.ir.facts import AxisFacts
from streamfx.ir.joint import bound_arguments, tensor_operands
from streamfx.ir.operator_table import COPIES, SHAPE_ARGUMENT, Kind, of_kind
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE
from streamfx.passes.ops.rules.registry import broadcast, rule_for
from streamfx.passes.ops.traits import is_random

aten = torch.ops.aten
MAPS_SLICES = COPIES | of_kind(Kind.RESHAPE, Kind.UNSQUEEZE, Kind.EXPAND, Kind.PERMUTE, Kind.FILL)
IF_ALONG_OTHER_DIMS = of_kind(Kind.SQUEEZE, Kind.SLICE, Kind.SELECT, Kind.CONCAT, Kind.PAD, Kind.SUM) - {aten.squeeze.default}


class ConcatSlices:
    """The slices of values along one concatenated axis. Each slice is emitted once, right after its value."""

    def __init__(self, axes: AxisFacts, writer: GraphWriter, axis: AxisFactor, lengths: Sequence[int]) -> None:
        """Store the axes of all values, the concatenated axis, and the number of rows in each of its slices."""
        self.axes, self.writer, self.axis, self.lengths = axes, writer, axis, tuple(lengths)
        self.slices_by_value: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def dim(self, value: fx.Node) -> int | None:
        """Return a value's dimension along the concatenated axis; None if it has none, and is the same for all slices."""
        dims_of_axis = (i for i, dim in enumerate(self.axes.shapes[value]) if self.axis in self.axes.table.resolve(dim))
        return next(dims_of_axis, None)

    def can_slice(self, value: fx.Node) -> bool:
        """Return whether each slice of a value can be computed from the operands of a concatenation alone.

        Walk from the value back to concatenations along the axis. All operators in between must compute a slice of their
        result from the same slice of their operands.
        """
        todo, seen = [value], set[fx.Node]()
        while todo:
            node = todo.pop()
            if node not in self.axes.shapes:  # the node was written after the axes were found
                return False
            if node in seen or node in self.slices_by_value or self.dim(node) is None or self._is_concat_of_slices(node):
                continue
            if not self._maps_slices(node):
                return False
            seen.add(node)
            todo.extend(tensor_operands(node))
        return True

    def _has_axis_alone(self, value: fx.Node) -> bool:
        """Return whether at most one dimension of a value contains the axis, and is not a product of it and other axes."""
        dims = [self.axes.table.resolve(dim) for dim in self.axes.shapes[value]]
        return [dim for dim in dims if self.axis in dim] in ([], [(self.axis,)])

    def _is_concat_of_slices(self, node: fx.Node) -> bool:
        """Return whether a node is a `cat` along the axis, and its operands have the lengths of the slices."""
        dim = self.dim(node)
        if node.target is not aten.cat.default or not self._has_axis_alone(node) or dim != _concat_dim(node):
            return False
        rank, operand_values = node.meta[VALUE].dim(), [operand.meta[VALUE] for operand in tensor_operands(node)]
        lengths = tuple(value.shape[dim] for value in operand_values if value.dim() == rank)
        return lengths == self.lengths and len(operand_values) == len(lengths)

    def _maps_slices(self, node: fx.Node) -> bool:
        """Return whether a slice of an operator's result depends only on the same slice of its operands."""
        if node.op != "call_function" or not all(map(self._has_axis_alone, (node, *tensor_operands(node)))):
            return False
        if node.target in IF_ALONG_OTHER_DIMS:
            return self._keeps_axis(node)
        return node.target in MAPS_SLICES or (rule_for(node) is broadcast and not is_random(node))

    def _keeps_axis(self, node: fx.Node) -> bool:
        """Return whether an operator operates along other axes only: it does not sum over the axis, slice it or shift it."""
        signature, dim_by_label = self.axes.signatures.get(node), self.axes.labels.get(node, {})
        labels_of_axis = [label for label, dim in dim_by_label.items() if self.axis in self.axes.table.resolve(dim)]
        return (
            signature is not None
            and not signature.contracted_labels().intersection(labels_of_axis)
            and not any(map(signature.is_special, labels_of_axis))
        )

    def slices_of(self, value: fx.Node) -> tuple[fx.Node, ...]:
        """Return the slices of a value for which `can_slice` is true, in order; emit them if they do not exist yet.

        A concatenation's slices are its operands. A value without the axis is returned once for each slice.
        """
        if self.dim(value) is None:
            return (value,) * len(self.lengths)
        if value not in self.slices_by_value:
            if self._is_concat_of_slices(value):
                self.slices_by_value[value] = tensor_operands(value)
            else:
                operands = {operand: self.slices_of(operand) for operand in tensor_operands(value)}
                self.writer.move_before(first_operator_after(value))
                self.slices_by_value[value] = tuple(self._emit_slice(value, operands, i) for i in range(len(self.lengths)))
        return self.slices_by_value[value]

    def _emit_slice(self, value: fx.Node, operands: dict[fx.Node, tuple[fx.Node, ...]], i: int) -> fx.Node:
        """Emit the operator of a value on slice `i` of its operands; a shape argument, as of `view`, gets the slice's length.

        `operands` has the slices of each operand.
        """
        args, kwargs = fx.node.map_arg((value.args, value.kwargs), lambda node: operands[node][i] if node in operands else node)
        if (shape_position := SHAPE_ARGUMENT.get(value.target)) is not None:
            shape: list[Any] = list(args[shape_position])  # type: ignore[arg-type]
            shape[self.dim(value)] = self.lengths[i]  # type: ignore[index]
            args = (*args[:shape_position], shape, *args[shape_position + 1 :])
        return self.writer.call(value.target, *args, **kwargs)


def _concat_dim(node: fx.Node) -> int:
    """Return the dimension along which a `cat` concatenates, as a nonnegative number."""
    return int(bound_arguments(node)["dim"]) % node.meta[VALUE].dim()


def first_operator_after(value: fx.Node) -> fx.Node:
    """Return the first node after a value, in graph order, that is neither an input nor a `get_attr`: new nodes go before it."""
    node = value.next
    while node.op in ("placeholder", "get_attr"):
        node = node.next
    return node
