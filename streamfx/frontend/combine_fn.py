"""Read the combine function of an associative scan from its trace under `vmap`, and check that it only computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.passes.rewrite.scans.scan_hop import ScanStep, is_pure_operator
from streamfx.runtime.associative import known_combine
from streamfx.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket, is_traceable_wrapper_subclass, tree_map
from streamfx.torch_private.vmapped import traced_on_rows


@dataclass(frozen=True)
class CombineInput:
    """A row that the function takes as its argument."""

    number: int


@dataclass(frozen=True)
class CombineValue:
    """The result of an operator of the function."""

    number: int


@dataclass(frozen=True)
class Body:
    """The function's operators with numbered values, equal for all levels; `given` are tensors from outside."""

    operators: tuple[tuple[Any, ...], ...]
    results: tuple[Any, ...]
    given: tuple[fx.Node, ...]

    @classmethod
    def read(cls, rows: Sequence[fx.Node], operators_inside: Sequence[fx.Node], results: Sequence[Any]) -> Body | None:
        """Read a body; return None if a value depends on anything but rows and plain tensors from outside."""
        names: dict[fx.Node, Any] = {row: CombineInput(number) for number, row in enumerate(rows)}
        names |= {node: CombineValue(number) for number, node in enumerate(operators_inside)}
        sources = [source for node in operators_inside for source in node.all_input_nodes]
        outer_tensors = dict.fromkeys(source for source in sources if source not in names)
        if (
            not all(map(is_plain, outer_tensors))
            or not all(map(_is_of_torch, operators_inside))
            or not all(result in names for result in results)
        ):
            return None
        operators = [
            (node.op, node.target, *fx.node.map_arg((node.args, node.kwargs), lambda source: names.get(source, source)))
            for node in operators_inside
        ]
        return cls(tuple(operators), tuple(names[result] for result in results), tuple(outer_tensors))


def is_plain(node: fx.Node) -> bool:
    """Return whether a value is a plain tensor, not a wrapper subclass such as a shard."""
    value = node.meta.get(EXAMPLE_VALUE)
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def _is_of_torch(node: fx.Node) -> bool:
    """Return whether a function of torch computes a tensor, so that its gradient is that of the operators called.

    A user function that Dynamo does not trace, or an `autograd.Function`, may have another gradient.
    """
    target = node.target
    is_known = isinstance(target, (str, BuiltinFunctionType, OpOverload, OpOverloadPacket)) or (
        getattr(target, "__module__", "") in ("torch.functional", "torch.nn.functional", "torch._tensor")
    )
    return is_plain(node) and is_known and not isinstance(target, HigherOrderOperator)


def combine_of(body: Body, elements: Sequence[fx.Node]) -> int | None:
    """Return the number of the combine function for rows of these elements; None if it does more than compute."""
    rows = [_empty_row(node) for node in (*elements, *elements)]  # distinct tensors, since tracing identifies inputs by object
    try:
        traced = traced_on_rows(_build_module(body, len(rows)), [*rows, *map(_empty_like, body.given)])
    except Exception:  # operators raise many kinds of errors on unsupported fake rows
        return None
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    if not all(node.op == "call_function" and is_pure_operator(node) for node in nodes):
        return None
    return known_combine(ScanStep(traced.graph, 0).with_views().graph, len(body.given))


def _empty_row(node: fx.Node) -> Tensor:
    """Return an uninitialized row of a value: without its first dimension."""
    value: Tensor = node.meta[EXAMPLE_VALUE]
    return value.new_empty(value.shape[1:])


def _empty_like(node: fx.Node) -> Tensor:
    """Return an uninitialized tensor with the shape of a value."""
    value: Tensor = node.meta[EXAMPLE_VALUE]
    return value.new_empty(value.shape)


def _build_module(body: Body, rows: int) -> fx.GraphModule:
    """Build the function, which takes this many rows, and tensors from outside."""
    graph = fx.Graph()
    node_of: dict[Any, fx.Node] = {CombineInput(number): graph.placeholder(f"row_{number}") for number in range(rows)}
    node_of |= {node: graph.placeholder(f"given_{number}") for number, node in enumerate(body.given)}
    for number, (kind, target, args, kwargs) in enumerate(body.operators):
        arguments = tree_map(
            lambda item: node_of.get(item, item) if isinstance(item, (CombineInput, CombineValue, fx.Node)) else item,
            (args, kwargs),
        )
        node_of[CombineValue(number)] = graph.create_node(kind, target, *arguments)
    graph.output(tuple(node_of[result] for result in body.results))
    return fx.GraphModule(torch.nn.Module(), graph)
