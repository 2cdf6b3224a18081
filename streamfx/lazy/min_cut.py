"""Find the fewest bytes from which a value can be recomputed: a minimum cut through the cheap, pure functions before it.

    residual [b t d] --norm--> hidden [b t d] --linear(weight)--> logits [b t v] --/ c--> --tanh--> --* c--> output
    ^ minimum cut: the fewest bytes; parameters cost nothing, because the model keeps them

In the network, each ancestor of the output has an edge from (node, "out") to (node, "in") whose capacity is the cost of saving
it, and flow runs from the output to `START`, which represents all values that cannot be recomputed. Cut edges are the values to
save.

Among minimum cuts, take the cut furthest from the output that recomputes no further matrix product. Gradients of the output
then enter the backward graph before the norm, whose backward runs in the same loops as the backward of the loss. With a cut
after the norm, the norm's inputs would be recomputed for these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from streamfx.lazy.op_kinds import CONTRACTING, OpKind, op_kind
from streamfx.lazy.values import DynamoValues, bytes_of, example, is_dense, is_number, is_parameter

START = "start"
DEPTH = 2  # maximum number of matrix products on a path to the output: a head, or a head in two factors (such as an adapter)


@dataclass(frozen=True)
class Frontier:
    """A minimum cut: the `saved` values from which a value is recomputed, and the nodes to run, in order, up to the value."""

    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    saved_bytes: int  # without parameters


def find_frontier(target: fx.Node, values: DynamoValues) -> Frontier | None:
    """Return the values with the fewest bytes from which the node `target` can be recomputed, and the nodes to run for that.

    None if it cannot be recomputed: it is not a cheap pure function, or a value that it needs cannot be saved.
    """
    if not _is_recomputable(target, values):
        return None
    cone = _cone(target, values)
    network = _network(target, cone, values)
    try:
        _, (output_side, _) = networkx.minimum_cut(network, target, START)  # of all minimum cuts, the cut nearest to START
    except networkx.NetworkXUnbounded:
        return None
    chosen: set[fx.Node] = {target}
    for node in reversed(tuple(cone)):
        if (node, "in") in output_side and not chosen.isdisjoint(node.users):
            chosen.add(node)
    saved = tuple(node for node in cone if node not in chosen and not chosen.isdisjoint(node.users))
    recomputed = tuple(node for node in cone if node in chosen)
    saved_bytes = sum(bytes_of(node) or 0 for node in saved if not is_parameter(node))
    return Frontier(saved, (*recomputed, target), saved_bytes)


@dataclass(frozen=True)
class _Downstream:
    """An ancestor of the target: the number of matrix products between them, and whether the ancestor can be recomputed."""

    products: int
    can_rerun: bool


def _cone(target: fx.Node, values: DynamoValues) -> Mapping[fx.Node, _Downstream]:
    """Return the ancestors of `target`, in program order, each with how it relates to the target.

    The search stops at ancestors that cannot be recomputed: they are included, but their operands are not.
    """
    products = {target: 0}
    cone: dict[fx.Node, _Downstream] = {}
    for node in reversed(values.graph.nodes):
        if node not in products:
            continue
        depth = products[node] + int(op_kind(node) in CONTRACTING)
        can_rerun = node is target or (_is_recomputable(node, values) and depth <= DEPTH)
        if node is not target:
            cone[node] = _Downstream(products[node], can_rerun)
        for operand in _operands(node, values) if can_rerun else ():
            products[operand] = max(products.get(operand, 0), depth)
    return dict(reversed(cone.items()))


def _network(target: fx.Node, cone: Mapping[fx.Node, _Downstream], values: DynamoValues) -> networkx.DiGraph:
    """Return the flow network of `target` and its ancestors (`cone`): see the file's docstring.

    Edges lead from a value to its operands, or to `START` if it cannot be recomputed; they have no limit. The edge from
    (node, "out") to (node, "in") has the cost of saving the node as capacity, or no limit if the node cannot be saved.
    """
    network = networkx.DiGraph()
    network.add_nodes_from([target, START])
    network.add_edges_from((target, (operand, "out")) for operand in _operands(target, values))
    for node, downstream in cone.items():
        capacity = _capacity(node, downstream, values)
        network.add_edge((node, "out"), (node, "in"), **({} if capacity is None else {"capacity": capacity}))
        sources = [(operand, "out") for operand in _operands(node, values)] if downstream.can_rerun else [START]
        network.add_edges_from(((node, "in"), source) for source in sources)
    return network


def _operands(node: fx.Node, values: DynamoValues) -> tuple[fx.Node, ...]:
    """Return the operands that a node depends on, except sizes that the inputs of the graph determine."""
    return tuple(operand for operand in node.all_input_nodes if not is_known_size(operand, values))


def is_known_size(node: fx.Node, values: DynamoValues) -> bool:
    """Return whether a node is a size that is constant, or determined by the sizes of the inputs."""
    value = example(node)
    if isinstance(value, torch.SymInt):
        return values.sizes.can_read(value.node.expr)
    return isinstance(value, int)


def _is_recomputable(node: fx.Node, values: DynamoValues) -> bool:
    """Return whether a node may be run again later: a cheap pure function of tensors and numbers that nothing writes to.

    A number counts only if it is read from a zero-dimensional tensor (`item`).
    """
    kind = op_kind(node)
    if kind is None or not (is_dense(node) or is_number(node)) or (is_dense(node) and values.is_written(node)):
        return False
    if kind is OpKind.NUMBER:
        return is_dense(node.args[0]) and example(node.args[0]).dim() == 0
    return all(is_dense(operand) or is_number(operand) for operand in node.all_input_nodes)


def _capacity(node: fx.Node, downstream: _Downstream, values: DynamoValues) -> int | None:
    """Return the cost of saving a value; None if it cannot be saved (no tensor, written to, or of unknown size).

    The cost is 8 times its bytes; smaller numbers break ties. They prefer values that are returned anyway (0 instead of 4), then
    values at most one matrix product away from the target (2), then values that are not views, which would be copied (1).
    Parameters cost nothing.
    """
    if not is_dense(node) or values.is_written(node):
        return None
    if is_parameter(node):
        return 0
    size = bytes_of(node)
    if size is None:
        return None
    is_view = values.bases[node] is not node
    return 8 * size + 4 * int(node not in values.outputs) + 2 * int(downstream.products > 1) + int(is_view)
