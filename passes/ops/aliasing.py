"""In whose memory may a value lie?"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_size
from streamfx.runtime.in_place import OVER_FIRST
from streamfx.runtime.restride import RestridedOperator
from streamfx.torch_private import OpOverload


@dataclass(frozen=True)
class OtherMemory:
    """Memory of a value that is no result itself, by the name that the value had."""

    name: str


def memories(node: fx.Node) -> frozenset[fx.Node]:
    """The values of a graph whose memory this one may show: itself alone, where an operator makes it."""
    found, todo, seen = set[fx.Node](), [node], {node}
    while todo:
        value = todo.pop()
        producer = value.all_input_nodes[0] if value.target is operator.getitem else value
        if producer.op != "call_function" or not producer.all_input_nodes or not _may_alias(producer.target):
            found.add(value)
            continue
        given = producer.all_input_nodes[:1] if producer.target in OVER_FIRST else producer.all_input_nodes
        operands = [source for source in given if not is_size(source)]
        todo += [source for source in operands if source not in seen]
        seen.update(operands)
    return frozenset(found)


def memories_made(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The values whose memory these show, but for those that are given to the graph."""
    return {memory for node in nodes for memory in memories(node) if memory.op == "call_function"}


def _may_alias(target: Any) -> bool:
    """Whether an operator may return memory that it was given: those of a schema say so, of others nobody knows."""
    if isinstance(target, RestridedOperator):
        return False
    return not isinstance(target, OpOverload) or target is torch.ops.aten._unsafe_view.default or is_view(target)


def is_view(target: OpOverload) -> bool:
    """Whether an operator's schema says that a result is part of an operand's memory."""
    return any(result.alias_info is not None for result in target._schema.returns)
