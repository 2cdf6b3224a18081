"""Find the values whose memory a value may share: views share their operand's memory, and unknown functions may.

An in-place update needs this: it must not change a value that is read later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from streamfx.ir.joint import is_size
from streamfx.ir.operator_table import returns_view
from streamfx.ir.sizes import Size
from streamfx.runtime.in_place import OVERWRITES_FIRST
from streamfx.runtime.restride import RestridedOperator
from streamfx.torch_private import OpOverload


@dataclass(frozen=True)
class OtherMemory:
    """Memory of a value that is not itself a result, identified by the value's name in the trace."""

    name: str


class MemoryPlace(NamedTuple):
    """Where a view lies in memory: `offset` and `strides` count elements.

    The base is the name of an input, the index of a result, or other memory. The offset counts from the first element of
    an input or a result, or from the start of other memory.
    """

    base: int | str | OtherMemory
    offset: Size
    strides: tuple[Size, ...]


def memories(node: fx.Node) -> frozenset[fx.Node]:
    """Return the values whose memory `node` may alias: graph inputs, and results of operators that allocate.

    Only the value itself if its own operator allocates it. For `z = y.view(-1)` with `y = x + 1`, the result is {y}.
    """
    owners, todo, seen = set[fx.Node](), [node], {node}
    while todo:
        value = todo.pop()
        producer = value.all_input_nodes[0] if value.target is operator.getitem else value
        if producer.op != "call_function" or not producer.all_input_nodes or not _may_alias(producer.target):
            owners.add(value)
            continue
        aliased = producer.all_input_nodes[:1] if producer.target in OVERWRITES_FIRST else producer.all_input_nodes
        operands = [source for source in aliased if not is_size(source)]
        todo += [source for source in operands if source not in seen]
        seen.update(operands)
    return frozenset(owners)


def computed_memories(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values, computed by the graph itself (not graph inputs), whose memory any of the nodes may alias."""
    return {memory for node in nodes for memory in memories(node) if memory.op == "call_function"}


def _may_alias(target: Any) -> bool:
    """Return whether an operator may return an input's memory: schemas declare it, and other operators are assumed to."""
    if isinstance(target, RestridedOperator):
        return False
    return not isinstance(target, OpOverload) or target is torch.ops.aten._unsafe_view.default or returns_view(target)
