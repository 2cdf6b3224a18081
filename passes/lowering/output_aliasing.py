"""Who writes into one value changes no other.

A step may write to its inputs, once its forward half has run: what is saved of them for the backward half is a copy.

    y = x @ codebook;  codebook.mul_(0.9)      saved: clone(t(codebook))

The caller may write to what it is given: autograd adds the next gradient into the last one. Equal operators are one, so that
two results may be views of one value where those of the trace were not.

    x + a(h) + b(h)      gradients of the biases: view(sum(d)), clone(view(sum(d)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import is_tensor
from streamfx.node_meta import MUTATED
from streamfx.passes.ops.aliasing import memories

aten = torch.ops.aten


def copied_if_written(node: fx.Node) -> fx.Node:
    """What a forward graph saves of a value: a copy where the value may be written to before it is read."""
    if not any(memory.meta.get(MUTATED, False) for memory in memories(node) if memory.op == "placeholder"):
        return node
    first = next(other for other in (node.graph.nodes if node.op == "placeholder" else [node.next]) if other.op != "placeholder")
    with node.graph.inserting_before(first):
        return _copy(node)


def gradients_apart(gradients: Sequence[Any]) -> list[Any]:
    """Gradients, each in memory that nobody else has, neither another gradient nor what the graph is given."""
    held, found = set[fx.Node](), list[Any]()
    for gradient in gradients:
        if is_tensor(gradient):
            own = memories(gradient)
            if own & held or any(map(_is_given, own)):
                gradient, own = _copy(gradient), frozenset()
            held |= own
        found.append(gradient)
    return found


def results_apart(
    results: Sequence[Any], traced: Sequence[frozenset[str]], saved: Sequence[fx.Node], names: Mapping[fx.Node, str]
) -> list[Any]:
    """Results that share memory with each other, with inputs and with what is saved only where they did so in the trace.

    `traced` has for each result the names of the values that it showed there, `names` those of this graph's values.
    """
    kept_for_backward = frozenset[fx.Node]().union(*map(memories, saved))
    shown, found = dict[fx.Node, frozenset[str]](), list[Any]()
    for result, before in zip(results, traced, strict=True):
        if is_tensor(result):
            own = memories(result)
            is_new = (names.get(memory) not in before for memory in own if _is_given(memory) or memory in kept_for_backward)
            if any(is_new) or any(shown.get(memory, before) != before for memory in own):
                result, own = _copy(result), frozenset()
            shown.update(dict.fromkeys(own, before))
        found.append(result)
    return found


def _is_given(memory: fx.Node) -> bool:
    """Whether a value is there before the graph runs, and after it: an input, or a constant of the graph."""
    return memory.op in ("placeholder", "get_attr")


def _copy(node: fx.Node) -> fx.Node:
    made = node.graph.call_function(aten.clone.default, (node,))
    made.meta = dict(node.meta)
    return made
