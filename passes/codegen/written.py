"""Inputs that a step writes to, once its forward half has run: what is saved of them for the backward half is a copy.

y = x @ codebook;  codebook.mul_(0.9)      saved: clone(t(codebook))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.torch_private import OpOverload

aten = torch.ops.aten


def shows_written_input(node: fx.Node) -> bool:
    """Whether a value of an outer graph may lie in the memory of an input that the step writes to."""
    if node.op == "placeholder":
        return bool(node.meta.get("streamfx_mutated", False))
    if node.op != "call_function" or not _may_alias(node.target):
        return False
    return any(shows_written_input(source) for source in node.all_input_nodes)


def _may_alias(target: Any) -> bool:
    """Whether an operator may return memory that it was given: those of a schema say so, of others nobody knows."""
    return not isinstance(target, OpOverload) or any(result.alias_info is not None for result in target._schema.returns)


def kept(node: fx.Node) -> fx.Node:
    """What a forward graph saves of a value: a copy where the value may be written to before it is read."""
    if not shows_written_input(node):
        return node
    first = next(other for other in (node.graph.nodes if node.op == "placeholder" else [node.next]) if other.op != "placeholder")
    with node.graph.inserting_before(first):
        made = node.graph.call_function(aten.clone.default, (node,))
    made.meta = dict(node.meta)
    return made
