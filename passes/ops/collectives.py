"""Collectives: operators that all ranks of a process group run together, and the operators that may surround them.

A collective of torch returns at once; a *wait* on its result follows. Streamfx's own all-reduce includes its wait, so that
it may run in a loop. Operators are identified by name, since a torch build without distributed packages does not define them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from streamfx.dialect.collectives import ALL_REDUCE
from streamfx.ir.collective_ops import find_group
from streamfx.ir.joint import bound_arguments
from streamfx.ir.operator_table import COPIES, Kind, of_kind
from streamfx.passes.ops.traits import is_random
from streamfx.torch_private import OpOverload

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
ELEMENTWISE = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")  # all reductions of torch but those with factors
COALESCED = {  # by collective, its coalesced variant, which sends several values in one call
    "_c10d_functional::all_gather_into_tensor": "all_gather_into_tensor_coalesced",
    "_c10d_functional::all_reduce": "all_reduce_coalesced",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
}
LINEAR_REDUCTIONS = ("sum", "avg")
# operators that assemble a tensor from shards, or cut it into shards, and keep the order of elements in memory
REASSEMBLES = COPIES | of_kind(Kind.RESHAPE, Kind.SLICE, Kind.SPLIT, Kind.CONCAT, Kind.PAD) | {operator.getitem}


def is_collective(node: fx.Node) -> bool:
    """Return whether a node is a collective or a wait for one; in Dynamo's graphs, too, whose operators have no overloads."""
    return node.op == "call_function" and (_is_collective_operator(node.target) or is_reduced_over_ranks(node))


@lru_cache(1 << 10)
def _is_collective_operator(target: Any) -> bool:
    """Return whether an operator is in a namespace of collectives."""
    return str(target).split(".")[0] in NAMESPACES


def is_reduced_over_ranks(node: fx.Node) -> bool:
    """Return whether a node is streamfx's all-reduce, which may run in a loop."""
    return node.target is ALL_REDUCE


def has_collectives(graph: fx.Graph) -> bool:
    """Return whether a graph has collectives, so that all ranks must run it together."""
    return any(map(is_collective, graph.nodes))


def is_gather(node: fx.Node) -> bool:
    """Return whether a node is an all-gather, which returns the concatenated shards of all ranks."""
    return isinstance(node.target, OpOverload) and node.target.name() in GATHERS


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node is an all-reduce or a reduce-scatter, of one value or coalesced."""
    return isinstance(node.target, OpOverload) and node.target.name() in REDUCTIONS


def is_all_reduce(node: fx.Node) -> bool:
    """Return whether a node is torch's all-reduce of one value; a separate node waits for its result."""
    return isinstance(node.target, OpOverload) and node.target.name() in ALL_REDUCES


def find_group_name(node: fx.Node) -> str | None:
    """Return the name of the process group that runs a collective.

    None if the operator has no group (a wait), or its group is given in another way than by name.
    """
    group = find_group(bound_arguments(node))
    return group if isinstance(group, str) else None


def find_group_names(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the names of the distinct process groups of the collectives among these nodes, in order."""
    groups = (find_group_name(node) for node in nodes if is_collective(node))
    return list(dict.fromkeys(group for group in groups if group is not None))


def has_unused_waits(graph: fx.Graph) -> bool:
    """Return whether a graph waits for a value that is unused on this rank; another rank may use it."""
    return any(is_wait(node) and not node.users for node in graph.nodes)


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for the result of a collective."""
    return isinstance(node.target, OpOverload) and node.target.name() == WAIT


def coalesced_operator(node: fx.Node) -> OpOverload | None:
    """Return the coalesced variant of a collective, which sends several values in one call.

    For example, `all_reduce_coalesced` for a node that calls `all_reduce`. None if there is none.
    """
    if not isinstance(node.target, OpOverload) or node.kwargs or node.target.name() not in COALESCED:
        return None
    coalesced: OpOverload = getattr(torch.ops._c10d_functional, COALESCED[node.target.name()]).default
    return coalesced


def is_deterministic(node: fx.Node) -> bool:
    """Return whether an operator depends on its operands alone and mutates nothing, so that it may be moved or
    recomputed.
    """
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable and not is_random(node)


def is_linear_reduction(node: fx.Node) -> bool:
    """Return whether a node reduces over ranks by a sum or average, so that reducing a sum equals summing the reduced terms."""
    return is_reduction(node) and node.args[1] in LINEAR_REDUCTIONS
