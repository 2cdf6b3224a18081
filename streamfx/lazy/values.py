"""Analyze the values of a Dynamo graph: bytes, shared memory, writes, modes.

Sizes and memory come from the FakeTensors that Dynamo stores on its nodes. Dynamo ran every function on them in order, so views
share a storage, and each write has incremented the version counter of its target. The *base* of a tensor is the first node with
the same storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.ir.recipe import Context, SizeSources
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD, is_held_by_model, is_traceable_wrapper_subclass

WRITING = frozenset({"setitem", "iadd", "iand", "ior", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"})
NESTED_MODES = ("torch._functorch", "torch._C._functorch")


@dataclass(frozen=True)
class DynamoValues:
    """Facts about a Dynamo graph. `bases` maps a tensor to the first node with the same memory."""

    graph: fx.Graph
    bases: dict[fx.Node, fx.Node]
    written: frozenset[fx.Node]  # bases that some function writes into
    contexts: dict[fx.Node, Context]  # the autocasts and grad mode that the graph itself sets around some nodes
    sizes: SizeSources  # where to read each size symbol
    outputs: frozenset[fx.Node]

    def is_written(self, node: fx.Node) -> bool:
        """Return whether some function writes into the memory of a tensor."""
        return self.bases[node] in self.written


def example(node: Any) -> Any:
    """Return the example value that Dynamo stored for a node; return other arguments unchanged."""
    return node.meta.get(EXAMPLE_VALUE) if isinstance(node, fx.Node) else node


def is_dense(node: Any) -> bool:
    """Return whether a node is a plain strided tensor: no subclass such as DTensor, not nested, not quantized."""
    value = example(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


def is_number(node: fx.Node) -> bool:
    return isinstance(example(node), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_parameter(node: fx.Node) -> bool:
    """Return whether a node is a parameter, a buffer or another tensor that the model keeps alive anyway."""
    held = is_held_by_model(node) or isinstance(example(node), torch.nn.Parameter)
    return node.op == "placeholder" and held


def bytes_of(node: fx.Node) -> int | None:
    """Return the bytes of a node's tensor, at the traced sizes if its shape is dynamic; None if a size depends on data."""
    total = example(node).element_size()
    for size in example(node).shape:
        hint = size if isinstance(size, int) else size.node.hint
        if hint is None:
            return None
        total *= int(hint)
    return int(total)


def values_of(graph: fx.Graph) -> DynamoValues:
    """Return the facts about a Dynamo graph: shared memory, writes, modes around nodes, sources of sizes, outputs."""
    bases, written = _memory_bases(graph)
    outputs = frozenset(graph.output_node().all_input_nodes)
    return DynamoValues(graph, bases, written, dict(_contexts(graph)), _size_sources(graph), outputs)


def has_nested_modes(graph: fx.Graph) -> bool:
    """Return whether part of the graph runs inside a transform (`vmap`, `grad`, ...), where values have other semantics."""
    return any(str(getattr(node.target, "__module__", "")).startswith(NESTED_MODES) for node in graph.nodes)


def _memory_bases(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], frozenset[fx.Node]]:
    """Return the base of each tensor node (the first node with the same storage), and the bases that a function writes into."""
    first_by_storage: dict[int, fx.Node] = {}
    bases: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_dense(node):
            bases[node] = first_by_storage.setdefault(example(node).untyped_storage()._cdata, node)
    written = {bases[node] for node in bases if example(node)._version}
    for node in graph.nodes:
        written.update(bases[argument] for argument in _written_arguments(node) if argument in bases)
    return bases, frozenset(written)


def _written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments that a call may write into, by its name and schema: all, or the first of an in-place function.

    Empty if it writes into none.
    """
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in WRITING or node.kwargs.get("inplace")
    schema = getattr(node.target, "_schema", None)
    if "out" in node.kwargs or "mutation" in name or (schema is not None and schema.is_mutable):
        return tuple(node.all_input_nodes)
    return tuple(node.all_input_nodes[:1]) if is_in_place else ()


def _contexts(graph: fx.Graph) -> Iterator[tuple[fx.Node, Context]]:
    """Yield the nodes around which the graph itself sets modes, each with its autocasts and its grad mode.

    A graph ends in the grad mode of the call, so any other grad mode comes from a `with` block.
    """
    setters = [node for node in graph.nodes if node.target is SET_GRAD]
    grad = ambient = bool(setters[-1].args[0]) if setters else None
    open_autocasts: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is SET_GRAD:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            open_autocasts.append(node)
        elif node.target is EXIT_AUTOCAST:
            open_autocasts.remove(node.args[0])  # type: ignore[arg-type]
        elif open_autocasts or grad is not ambient:
            yield node, Context(tuple(entry.args for entry in open_autocasts), None if grad is ambient else grad)


def _size_sources(graph: fx.Graph) -> SizeSources:
    """Return where a call can read each size symbol: the index of an input, and its dimension (None if the input is the size).

    Only sizes that are a single symbol count, and the first place of each.
    """
    sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for input_index, node in enumerate(graph.find_nodes(op="placeholder")):
        value = example(node)
        dims = value.shape if isinstance(value, torch.Tensor) else ()
        candidates: list[tuple[Any, int | None]] = [(value, None)] if isinstance(value, torch.SymInt) else []
        for size, dim in candidates + [(size, dim) for dim, size in enumerate(dims)]:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sources.setdefault(size.node.expr, (input_index, dim))
    return SizeSources(sources)
