"""Operators that all ranks of a group run together: which they are, and what may stand around them.

By name: a torch without distributed packages does not have them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from streamfx.ir.collective_ops import group_among
from streamfx.ir.joint import bound_arguments
from streamfx.passes.ops.traits import is_random
from streamfx.runtime.collective_calls import ALL_REDUCE
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
GATHERS = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_into_tensor_coalesced")
REDUCTIONS = (
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_reduce_coalesced",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::reduce_scatter_tensor_coalesced",
)
ALL_REDUCES = ("_c10d_functional::all_reduce",)
WAIT = "_c10d_functional::wait_tensor"
ELEMENTWISE = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")  # all that torch knows but those with factors
OF_SEVERAL = {  # what runs several at once
    "_c10d_functional::all_gather_into_tensor": "all_gather_into_tensor_coalesced",
    "_c10d_functional::all_reduce": "all_reduce_coalesced",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
}
LINEAR_REDUCTIONS = ("sum", "avg")
PUTS_TOGETHER = frozenset(  # shards to a whole, and a whole to shards
    {
        operator.getitem,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
    }
)


def is_collective(node: fx.Node) -> bool:
    """In Dynamo's graphs, too, where operators have no overloads yet."""
    return node.op == "call_function" and (str(node.target).split(".")[0] in NAMESPACES or is_reduced_over_ranks(node))


def is_reduced_over_ranks(node: fx.Node) -> bool:
    """Whether a value is reduced over ranks by the operator that may stand in a loop."""
    return node.target is ALL_REDUCE


def has_collectives(graph: fx.Graph) -> bool:
    """Whether ranks have to run a graph together."""
    return any(map(is_collective, graph.nodes))


def is_gather(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.name() in GATHERS


def is_reduction(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.name() in REDUCTIONS


def is_all_reduce(node: fx.Node) -> bool:
    """Whether a value is reduced over ranks element by element; it has to be waited for."""
    return isinstance(node.target, OpOverload) and node.target.name() in ALL_REDUCES


def group_of(node: fx.Node) -> str | None:
    """The ranks that run a collective together, by name; None of what has none (a wait), or one without a name."""
    group = group_among(bound_arguments(node))
    return group if isinstance(group, str) else None


def groups_of(nodes: Iterable[fx.Node]) -> list[str]:
    """The groups of the collectives among these nodes, each once."""
    groups = (group_of(node) for node in nodes if is_collective(node))
    return list(dict.fromkeys(group for group in groups if group is not None))


def has_unused_waits(graph: fx.Graph) -> bool:
    """Whether a graph waits for what nobody reads on this rank; another may."""
    return any(is_wait(node) and not node.users for node in graph.nodes)


def is_wait(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.name() == WAIT


def of_several(node: fx.Node) -> OpOverload | None:
    """What does to several values at once what a collective does to one; None for what is none."""
    if not isinstance(node.target, OpOverload) or node.kwargs or node.target.name() not in OF_SEVERAL:
        return None
    found: OpOverload = getattr(torch.ops._c10d_functional, OF_SEVERAL[node.target.name()]).default
    return found


def gives_the_same_twice(node: fx.Node) -> bool:
    """Whether an operator depends on its operands alone and changes nothing, so that it may run elsewhere, and again."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable and not is_random(node)


def is_linear_reduction(node: fx.Node) -> bool:
    """Whether a sum of what is reduced gives the sum of what it is reduced to."""
    return is_reduction(node) and node.args[1] in LINEAR_REDUCTIONS
