"""From which few bytes can a value be rebuilt?  A minimum cut of the cheap, pure functions behind it.

residual [b t d] --norm--> hidden [b t d] --linear(weight)--> logits [b t v] --/ c--> --tanh--> --* c--> output
^ cut here: the fewest bytes; parameters cost nothing, they live with the model

Of cuts with equally few bytes it is the furthest that asks for no further product. Gradients of the output then arrive in front
of the norm, and its backward half runs with the loss's; behind it, what the norm reads would be made again for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from streamfx.lazy.op_kinds import CONTRACTING, OpKind, kind_of
from streamfx.lazy.values import DynamoValues, bytes_of, example, is_dense, is_number, is_parameter

START = "start"
DEPTH = 2  # matrix products on the way to the output: a head, or one of low rank (an adapter's too)


@dataclass(frozen=True)
class Frontier:
    """What a value is rebuilt from. `rebuilt` are the nodes to run again, in order, the value itself last."""

    given: tuple[fx.Node, ...]
    rebuilt: tuple[fx.Node, ...]
    cost: int  # bytes kept in place of the value


def frontier_of(target: fx.Node, values: DynamoValues) -> Frontier | None:
    """The cheapest frontier; None where there is none."""
    if not _can_rebuild(target, values):
        return None
    cone = _cone(target, values)
    network = _network(target, cone, values)
    try:
        _, (near, _) = networkx.minimum_cut(network, target, START)  # of all minimum cuts the one nearest to the start
    except networkx.NetworkXUnbounded:
        return None
    asked: set[fx.Node] = {target}
    for node in reversed(tuple(cone)):
        if (node, "in") in near and not asked.isdisjoint(node.users):
            asked.add(node)
    given = tuple(node for node in cone if node not in asked and not asked.isdisjoint(node.users))
    rebuilt = tuple(node for node in cone if node in asked)
    cost = sum(bytes_of(node) or 0 for node in given if not is_parameter(node))
    return Frontier(given, (*rebuilt, target), cost)


@dataclass(frozen=True)
class _Downstream:
    """A node behind the target: how many products lie between the two, and whether it may be run again."""

    products: int
    again: bool


def _cone(target: fx.Node, values: DynamoValues) -> Mapping[fx.Node, _Downstream]:
    """The nodes behind `target`, in program order."""
    products = {target: 0}
    cone: dict[fx.Node, _Downstream] = {}
    for node in reversed(values.graph.nodes):
        if node not in products:
            continue
        own = products[node] + int(kind_of(node) in CONTRACTING)
        again = node is target or (_can_rebuild(node, values) and own <= DEPTH)
        if node is not target:
            cone[node] = _Downstream(products[node], again)
        for operand in _operands(node, values) if again else ():
            products[operand] = max(products.get(operand, 0), own)
    return dict(reversed(cone.items()))


def _network(target: fx.Node, cone: Mapping[fx.Node, _Downstream], values: DynamoValues) -> networkx.DiGraph:
    """Edges lead from a value to what it is made of. To keep one is to cut its edge, at the cost of its bytes."""
    network = networkx.DiGraph()
    network.add_nodes_from([target, START])
    network.add_edges_from((target, (operand, "out")) for operand in _operands(target, values))
    for node, behind in cone.items():
        capacity = _capacity(node, behind, values)
        network.add_edge((node, "out"), (node, "in"), **({} if capacity is None else {"capacity": capacity}))
        before = [(operand, "out") for operand in _operands(node, values)] if behind.again else [START]
        network.add_edges_from(((node, "in"), source) for source in before)
    return network


def _operands(node: fx.Node, values: DynamoValues) -> tuple[fx.Node, ...]:
    """The arguments that a node cannot do without; sizes follow from the inputs and need not be kept."""
    return tuple(operand for operand in node.all_input_nodes if not is_known_size(operand, values))


def is_known_size(node: fx.Node, values: DynamoValues) -> bool:
    value = example(node)
    if isinstance(value, torch.SymInt):
        return values.sizes.knows(value.node.expr)
    return isinstance(value, int)


def _can_rebuild(node: fx.Node, values: DynamoValues) -> bool:
    """Whether a node is a pure function of values that are still there when it is run again."""
    kind = kind_of(node)
    if kind is None or not (is_dense(node) or is_number(node)) or (is_dense(node) and values.is_written(node)):
        return False
    if kind is OpKind.NUMBER:
        return is_dense(node.args[0]) and example(node.args[0]).dim() == 0
    return all(is_dense(operand) or is_number(operand) for operand in node.all_input_nodes)


def _capacity(node: fx.Node, behind: _Downstream, values: DynamoValues) -> int | None:
    """The cost of keeping a value: its bytes; of equally many first what is returned anyway, then what is behind one product
    at most, then what is no view (that would be copied). None where it cannot be kept.
    """
    if not is_dense(node) or values.is_written(node):
        return None
    if is_parameter(node):
        return 0
    size = bytes_of(node)
    if size is None:
        return None
    is_view = values.bases[node] is not node
    return 8 * size + 4 * int(node not in values.outputs) + 2 * int(behind.products > 1) + int(is_view)
