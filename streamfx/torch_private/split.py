"""Split a Dynamo graph in two, as torch's DDPOptimizer does between its buckets.

"(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.node_meta import EXAMPLE_VALUE, FROM_NODE
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, dynamo_module
from streamfx.torch_private.vmapped import ENTER_VMAP, LEAVE_VMAP, LOAD

SET_GRAD: Any = torch._C._set_grad_enabled
COMPUTES = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class GraphPart:
    """Some operators of a graph as a separate graph, with its input nodes and its result nodes, in order."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def split_points(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the operators before which a Dynamo graph may be split, except the first (2.11, 2.13).

    There, no context (autocast, vmap) is open, and gradients are enabled. A call without a value may open an unknown context,
    unless it writes to a tensor; after such a call, no operator is yielded.
    """
    open_contexts, is_grad_on, is_first = 0, True, True
    for node in graph.nodes:
        if node.op not in COMPUTES:
            continue
        if not open_contexts and is_grad_on and not is_first:
            yield node
        is_first = False
        if node.target in (ENTER_AUTOCAST, ENTER_VMAP):
            open_contexts += 1
        elif node.target in (EXIT_AUTOCAST, LEAVE_VMAP):
            open_contexts -= 1
        elif node.target is SET_GRAD:
            is_grad_on = node.args[0] is True
        elif EXAMPLE_VALUE not in node.meta and node.target is not LOAD and not writes(node):
            return


def writes(node: fx.Node) -> bool:
    """Return whether a node is `x[i] = y`."""
    return getattr(node.target, "__name__", node.target) in ("setitem", "__setitem__")


def split_before(module: fx.GraphModule, first_of_second: fx.Node) -> tuple[GraphPart, GraphPart]:
    """Split a Dynamo graph before an operator, which becomes the first of the second part; return both parts.

    The results of the first part are the values that the second part, or the caller, needs.
    """
    nodes = list(module.graph.nodes)
    split_index = nodes.index(first_of_second)
    return _extract_part(module, nodes[:split_index]), _extract_part(module, nodes[split_index:])


def _extract_part(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> GraphPart:
    """Return a copy of the operators among `nodes` as a separate Dynamo graph.

    Its inputs are the values that they read and do not compute, except attributes of the module, which it reads itself; its
    results are the values that other nodes use.
    """
    operators = {node for node in nodes if node.op in COMPUTES}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outside_values = [node for node in module.graph.nodes if node not in operators and not operators.isdisjoint(node.users)]
    inputs = _with_symbols(module.graph, [node for node in outside_values if node.op != "get_attr"])
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        copies[node]._dynamo_source = getattr(node, "_dynamo_source", None)  # type: ignore[attr-defined]
    for node in outside_values:
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
    for node in nodes:
        if node in operators:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = tuple(node for node in nodes if node in operators and any(user not in operators for user in node.users))
    graph.output(tuple(copies[node] for node in results))
    return GraphPart(dynamo_module(module, graph), tuple(inputs), results)


def _with_symbols(graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Return all dynamic sizes among the inputs of the Dynamo graph, then `inputs`, whose shapes may be expressions in them."""
    sizes = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get(EXAMPLE_VALUE), torch.SymInt)]
    return [*sizes, *(node for node in inputs if node not in sizes)]


def example_input_of(node: fx.Node) -> Any:
    """Return the fake value with which a part is traced, for an input that the other part computes: detached from its graph."""
    value = node.meta[EXAMPLE_VALUE]
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def requires_gradient(node: fx.Node) -> bool:
    """Return whether a value in a Dynamo graph requires a gradient (2.11, 2.13)."""
    value = node.meta.get(EXAMPLE_VALUE)
    return isinstance(value, Tensor) and value.requires_grad


def can_be_input(node: fx.Node) -> bool:
    """Return whether a value of a Dynamo graph may cross a split: computed by the first part, and an input of the second.

    True for dense tensors (no subclasses) and integers, if their sizes do not depend on data.
    """
    value = node.meta.get(EXAMPLE_VALUE)
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)
        return is_plain and all(map(_is_known_at_trace_time, value.shape))
    return isinstance(value, (int, torch.SymInt)) and _is_known_at_trace_time(value)


def _is_known_at_trace_time(size: Any) -> bool:
    """Return whether a size has a value at trace time: it does not depend on data."""
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def names_in_dynamo(node: fx.Node) -> list[str]:
    """Return the names of the Dynamo nodes from which an AOTAutograd node comes, for messages (2.11, 2.13)."""
    return [source.name for source in node.meta.get(FROM_NODE) or ()]


def splits_for_ddp() -> bool:
    """Return whether the graph being compiled is a bucket of DDPOptimizer, which counts compilations (2.11, 2.13)."""
    return getattr(torch._guards.TracingContext.try_get(), "ddp_optimizer_ctx", None) is not None


def may_write_to_inputs() -> bool:
    """Return whether the graph being compiled may write to its inputs; True if unknown (2.11, 2.13)."""
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if metadata is None:
        return True
    return any(item.mutates_data or item.mutates_metadata or item.mutates_storage_metadata for item in metadata.input_info)
