"""Read the combine function of an associative scan from its trace under `vmap`, and check that it has no side effects.

The function takes two states (one row of each scanned tensor, left and right) and returns a state. Dynamo traces it once for each
level of the scan. Its operators are recorded with indices in place of nodes, so that the traces of two levels can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.dialect.associative_scan import register_combine_graph
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.passes.rewrite.scans.scan_hop import ScanStep, is_pure_operator
from streamfx.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket, is_traceable_wrapper_subclass, tree_map
from streamfx.torch_private.vmapped import traced_on_rows


@dataclass(frozen=True)
class CombineInput:
    """A row that the function takes as its argument, by its index."""

    index: int


@dataclass(frozen=True)
class CombineValue:
    """The result of an operator of the function, by the operator's index."""

    index: int


@dataclass(frozen=True)
class CombineBody:
    """The combine function's operators on indexed values, equal for all levels; `outer_tensors` are defined outside of it."""

    operators: tuple[tuple[Any, ...], ...]
    results: tuple[Any, ...]
    outer_tensors: tuple[fx.Node, ...]

    @classmethod
    def read(cls, rows: Sequence[fx.Node], operators_inside: Sequence[fx.Node], results: Sequence[Any]) -> CombineBody | None:
        """Return the function that maps `rows` (its arguments) to `results` by the given operators, in order.

        Return None if an operator is not a known function of torch, or a value depends on anything except the rows and plain
        tensors from outside.
        """
        names: dict[fx.Node, Any] = {row: CombineInput(index) for index, row in enumerate(rows)}
        names |= {node: CombineValue(index) for index, node in enumerate(operators_inside)}
        sources = [source for node in operators_inside for source in node.all_input_nodes]
        outer_tensors = dict.fromkeys(source for source in sources if source not in names)
        if (
            not all(map(is_plain_tensor, outer_tensors))
            or not all(map(_is_torch_function, operators_inside))
            or not all(result in names for result in results)
        ):
            return None
        operators = [
            (node.op, node.target, *fx.node.map_arg((node.args, node.kwargs), lambda source: names.get(source, source)))
            for node in operators_inside
        ]
        return cls(tuple(operators), tuple(names[result] for result in results), tuple(outer_tensors))


def is_plain_tensor(node: fx.Node) -> bool:
    """Return whether a node of a Dynamo graph is a tensor, and not of a wrapper subclass such as DTensor."""
    value = node.meta.get(EXAMPLE_VALUE)
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def _is_torch_function(node: fx.Node) -> bool:
    """Return whether a node calls a function of torch that returns a tensor.

    Its gradient is then the gradient of the operators that it calls. A user function that Dynamo does not trace, or an
    `autograd.Function`, may have another gradient.
    """
    target = node.target
    is_known = isinstance(target, (str, BuiltinFunctionType, OpOverload, OpOverloadPacket)) or (
        getattr(target, "__module__", "") in ("torch.functional", "torch.nn.functional", "torch._tensor")
    )
    return is_plain_tensor(node) and is_known and not isinstance(target, HigherOrderOperator)


def register_combine(body: CombineBody, elements: Sequence[fx.Node]) -> int | None:
    """Register the combine function for rows of these scanned tensors (`elements`), and return its integer identifier.

    The operator `streamfx.associative_scan` takes the identifier, because a graph cannot hold a function. Return None if the
    function cannot be traced on single rows, or has side effects or random draws.
    """
    # distinct tensors, since tracing identifies inputs by object
    rows = [_uninitialized_row(node) for node in (*elements, *elements)]
    try:
        traced = traced_on_rows(_build_module(body, len(rows)), [*rows, *map(_uninitialized_like, body.outer_tensors)])
    except Exception:  # operators raise many kinds of errors on unsupported fake rows
        return None
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    if not all(node.op == "call_function" and is_pure_operator(node) for node in nodes):
        return None
    return register_combine_graph(ScanStep(traced.graph, 0).with_views().graph, len(body.outer_tensors))


def _uninitialized_row(node: fx.Node) -> Tensor:
    """Return an uninitialized fake tensor like one row of a node's tensor, which drops the first dimension."""
    value: Tensor = node.meta[EXAMPLE_VALUE]
    return value.new_empty(value.shape[1:])


def _uninitialized_like(node: fx.Node) -> Tensor:
    """Return an uninitialized fake tensor with the shape of a node's tensor."""
    value: Tensor = node.meta[EXAMPLE_VALUE]
    return value.new_empty(value.shape)


def _build_module(body: CombineBody, num_rows: int) -> fx.GraphModule:
    """Return the combine function as a module, to be traced. Its arguments are `num_rows` rows, then the outer tensors."""
    graph = fx.Graph()
    node_of: dict[Any, fx.Node] = {CombineInput(index): graph.placeholder(f"row_{index}") for index in range(num_rows)}
    node_of |= {node: graph.placeholder(f"given_{index}") for index, node in enumerate(body.outer_tensors)}
    for index, (kind, target, args, kwargs) in enumerate(body.operators):
        arguments = tree_map(
            lambda item: node_of.get(item, item) if isinstance(item, (CombineInput, CombineValue, fx.Node)) else item,
            (args, kwargs),
        )
        node_of[CombineValue(index)] = graph.create_node(kind, target, *arguments)
    graph.output(tuple(node_of[result] for result in body.results))
    return fx.GraphModule(torch.nn.Module(), graph)
