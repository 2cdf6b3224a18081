"""Clone values so that a write to one does not change another.

A step may write to its inputs after its forward graph: then the backward graph gets a copy of their saved views.

    y = x @ codebook;  codebook.mul_(0.9)      saved: clone(t(codebook))

The caller may write to results: autograd accumulates the next gradient into the last one. Common subexpressions are
merged, so two results may be views of one value although the traced results were not.

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


def clone_if_mutated(node: fx.Node) -> fx.Node:
    """Return the node to save for a value: a copy if an input with the same memory is written to before backward."""
    if not any(memory.meta.get(MUTATED, False) for memory in memories(node) if memory.op == "placeholder"):
        return node
    later_nodes = node.graph.nodes if node.op == "placeholder" else [node.next]
    with node.graph.inserting_before(next(other for other in later_nodes if other.op != "placeholder")):
        return _copy(node)


def clone_shared_gradients(gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients, with a clone of each that shares memory with a gradient before it, an input, or a constant."""
    shared_memory, results = set[fx.Node](), list[Any]()
    for gradient in gradients:
        if is_tensor(gradient):
            memory = memories(gradient)
            if memory & shared_memory or any(map(_outlives_graph, memory)):
                gradient, memory = _copy(gradient), frozenset()
            shared_memory |= memory
        results.append(gradient)
    return results


def clone_shared_results(
    results: Sequence[Any], traced: Sequence[frozenset[str]], saved: Sequence[fx.Node], names: Mapping[fx.Node, str]
) -> list[Any]:
    """Return the results, with clones of those that newly share memory with other results, inputs or saved values.

    `traced` has, for each result, the names of the values whose memory it shared in the trace; `names` maps this
    graph's values to their names in the trace; `saved` are the values that the graph saves for backward.
    """
    saved_memory = frozenset[fx.Node]().union(*map(memories, saved))
    traced_names_of, separate = dict[fx.Node, frozenset[str]](), list[Any]()
    for result, traced_names in zip(results, traced, strict=True):
        if is_tensor(result):
            memory_of_result = memories(result)
            is_newly_shared = (
                names.get(memory) not in traced_names
                for memory in memory_of_result
                if _outlives_graph(memory) or memory in saved_memory
            )
            traced_apart = any(traced_names_of.get(memory, traced_names) != traced_names for memory in memory_of_result)
            if any(is_newly_shared) or traced_apart:
                result, memory_of_result = _copy(result), frozenset()
            traced_names_of.update(dict.fromkeys(memory_of_result, traced_names))
        separate.append(result)
    return separate


def _outlives_graph(memory: fx.Node) -> bool:
    """Return whether a value's memory outlives a run of the graph: an input, or a constant of the graph."""
    return memory.op in ("placeholder", "get_attr")


def _copy(node: fx.Node) -> fx.Node:
    """Emit a clone of a value, with its metadata; return the clone."""
    clone = node.graph.call_function(aten.clone.default, (node,))
    clone.meta = dict(node.meta)
    return clone
