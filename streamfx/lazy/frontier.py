"""From which few bytes can a value be rebuilt?  A minimum cut of the cheap, pure functions behind it.

hidden [b t d] --linear(weight)--> logits [b t v] --/ c--> --tanh--> --* c--> output
^ cut here: the fewest bytes; parameters cost nothing, they live with the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from streamfx.lazy.table import CONTRACTING, Kind, kind_of
from streamfx.lazy.values import Values, bytes_of, example, is_dense, is_number, is_parameter

DEPTH = 2  # matrix products on the way to the output: a head, or one of low rank (an adapter's too)


@dataclass(frozen=True)
class Frontier:
    """What a value is rebuilt from. `rebuilt` are the nodes to run again, in order, the value itself last."""

    given: tuple[fx.Node, ...]
    rebuilt: tuple[fx.Node, ...]
    cost: int  # bytes kept in place of the value


def frontier_of(target: fx.Node, values: Values) -> Frontier | None:
    """The cheapest frontier, of several the nearest; None where there is none."""
    if not _can_rebuild(target, values):
        return None
    cone = _cone(target, values)
    network = _network(target, cone, values)
    try:
        _, (_, near) = networkx.minimum_cut(network, "start", target)  # of all minimum cuts the one nearest to the target
    except networkx.NetworkXUnbounded:
        return None
    given = tuple(node for node in cone if (node, "out") in near and (node, "in") not in near)
    rebuilt = tuple(node for node in cone if (node, "in") in near)
    cost = sum(bytes_of(node) or 0 for node in given if not is_parameter(node))
    return Frontier(given, (*rebuilt, target), cost)


def _cone(target: fx.Node, values: Values) -> Mapping[fx.Node, bool]:
    """The nodes behind `target`, in program order; whether they may be run again."""
    depth = {target: int(kind_of(target) in CONTRACTING)}
    cone: dict[fx.Node, bool] = {}
    for node in reversed(values.graph.nodes):
        if node not in depth:
            continue
        depth[node] += int(node is not target and kind_of(node) in CONTRACTING)
        again = node is target or (_can_rebuild(node, values) and depth[node] <= DEPTH)
        if node is not target:
            cone[node] = again
        for operand in _operands(node, values) if again else ():
            depth[operand] = max(depth.get(operand, 0), depth[node])
    return dict(reversed(cone.items()))


def _network(target: fx.Node, cone: Mapping[fx.Node, bool], values: Values) -> networkx.DiGraph:
    """Values flow from "start" to the target. To keep one is to cut its edge, at the cost of its bytes."""
    network = networkx.DiGraph()
    network.add_nodes_from(["start", target])
    network.add_edges_from(((operand, "out"), target) for operand in _operands(target, values))
    for node, again in cone.items():
        capacity = _capacity(node, values)
        network.add_edge((node, "in"), (node, "out"), **({} if capacity is None else {"capacity": capacity}))
        before = [(operand, "out") for operand in _operands(node, values)] if again else ["start"]
        network.add_edges_from((source, (node, "in")) for source in before)
    return network


def _operands(node: fx.Node, values: Values) -> tuple[fx.Node, ...]:
    """The arguments that a node cannot do without; sizes follow from the inputs and need not be kept."""
    return tuple(operand for operand in node.all_input_nodes if not is_known_size(operand, values))


def is_known_size(node: fx.Node, values: Values) -> bool:
    value = example(node)
    if isinstance(value, torch.SymInt):
        return values.sizes.knows(value.node.expr)
    return isinstance(value, int)


def _can_rebuild(node: fx.Node, values: Values) -> bool:
    """Whether a node is a pure function of values that are still there when it is run again."""
    kind = kind_of(node)
    if kind is None or not (is_dense(node) or is_number(node)) or (is_dense(node) and values.is_written(node)):
        return False
    if kind is Kind.NUMBER:
        return is_dense(node.args[0]) and example(node.args[0]).dim() == 0
    return all(is_dense(operand) or is_number(operand) for operand in node.all_input_nodes)


def _capacity(node: fx.Node, values: Values) -> int | None:
    """The cost of keeping a value: twice its bytes, one more for a view (to be copied); None where it cannot be."""
    if not is_dense(node) or values.is_written(node):
        return None
    if is_parameter(node):
        return 0
    size = bytes_of(node)
    return None if size is None else 2 * size + int(values.bases[node] is not node)
