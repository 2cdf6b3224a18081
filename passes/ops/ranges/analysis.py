"""The ranges of a whole graph's values, each found when it is asked for."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_tensor, results_of
from streamfx.ir.piecewise import Pieces, hull_of
from streamfx.ir.ranges import LONGEST, Range, activation, everything
from streamfx.node_meta import PATTERN, VALUE
from streamfx.passes.ops.ranges.products import unpacked_product
from streamfx.passes.ops.ranges.transfer import applied
from streamfx.torch_private import OpOverload


class ValueRanges:
    """Ranges by value. `trained` are the sources that are taken for ordinary numbers: those that get a gradient, and tangents."""

    def __init__(self, trained: Collection[fx.Node] = ()) -> None:
        self._trained = frozenset(trained)
        self._known: dict[fx.Node, tuple[Range, ...]] = {}

    def of(self, node: fx.Node) -> Range:
        """The range of a tensor."""
        todo = [node]
        while todo:
            item = todo[-1]
            waiting = [source for source in item.all_input_nodes if source not in self._known]
            if waiting and item not in self._known:
                todo.extend(waiting)
                continue
            todo.pop()
            if item not in self._known:
                self._known[item] = self._of(item) or (everything(torch.float64),)
        return self._known[node][0]

    def note(self, node: fx.Node, known: Range) -> None:
        """A range that was found in another way, from what is known of rows and keys."""
        self._known[node] = (known,)

    def _of(self, node: fx.Node) -> tuple[Range, ...]:
        if node.op == "call_function":
            return self._made(node)
        return (self._given(node) if is_tensor(node) else Range(0, 0),)

    def _made(self, node: fx.Node) -> tuple[Range, ...]:
        if node.target is operator.getitem:
            made, position = self._known[node.args[0]], node.args[1]  # type: ignore[index]
            if isinstance(position, int) and position < len(made):
                return (made[position],)
        if not isinstance(node.target, OpOverload):
            return tuple(everything(torch.float64 if result is None else result.dtype) for result in results_of(node))
        unpacked = unpacked_product(node, self._operand)
        return applied(node, self._operand) if unpacked is None else (unpacked,)

    def _operand(self, node: fx.Node) -> Range:
        return self._known[node][0]

    def _given(self, node: fx.Node) -> Range:
        dtype: torch.dtype = node.meta[VALUE].dtype
        pattern: Any = node.meta.get(PATTERN)
        if isinstance(pattern, Pieces):
            return hull_of(pattern, LONGEST)
        return activation(dtype) if node in self._trained else everything(dtype)
