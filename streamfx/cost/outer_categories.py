"""Categories of the bytes that operators between loops allocate: the terms of the values of a host program.

all_gather(shard)                       whole weights
all_to_all(queries), and its layout     exchanged rows
attention(queries, keys, values)        whole attention
reduce_scatter(gradient of a weight)    gradients: values that only lead to results of the backward graph
"""

from __future__ import annotations

import operator

from torch import fx

from streamfx.cost.categories import ATTENTION, EXCHANGED, GRADIENTS, WEIGHTS
from streamfx.cost.comm import GATHERS, traffic_of_node
from streamfx.cost.flops import is_fused_attention
from streamfx.ir.operator_table import MOVES_ELEMENTS
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.runtime.restride import RESTRIDE_FUNCTIONS
from streamfx.torch_private import OpOverload

LAYOUT_OPERATORS = MOVES_ELEMENTS | set(RESTRIDE_FUNCTIONS)
WAIT_NAMES = ("_c10d_functional::wait_tensor", "_c10d_functional_autograd::wait_tensor")


def terms_between_loops(module: fx.GraphModule, is_backward: bool) -> dict[str, str]:
    """Return the categories of bytes, keyed by node name, for the nodes outside loops whose category is known."""
    weights = gathered_weights(module)
    gradients = _gradient_nodes(module) if is_backward else frozenset()
    exchanged = _exchanged_nodes(module, weights | gradients)
    attention = (node for node in module.graph.nodes if node.op == "call_function" and is_fused_attention(node.target))
    terms = dict.fromkeys(exchanged, EXCHANGED) | dict.fromkeys(attention, ATTENTION)
    terms |= dict.fromkeys(gradients, GRADIENTS) | dict.fromkeys(weights, WEIGHTS)
    return {node.name: term for node, term in terms.items()}


def may_allocate(node: fx.Node) -> bool:
    """Return whether a node calls an operator other than a view, or than a view that copies if needed (`reshape`)."""
    return node.op == "call_function" and node.target not in COPYING_VIEWS and not getattr(node.target, "is_view", False)


def gathered_weights(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the gathers that depend on graph inputs alone, through operators and not through loops, and their dependents.

    Such a gather collects the shards of a weight. Dependents are operators (other than collectives) that read a gathered
    weight and, besides, only values that are computed from graph inputs in the same way.
    """
    from_inputs = set(module.graph.find_nodes(op="placeholder"))
    weights = set[fx.Node]()
    for node in module.graph.nodes:
        is_operator = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if is_operator and node.all_input_nodes and from_inputs.issuperset(node.all_input_nodes):
            from_inputs.add(node)
            traffic = traffic_of_node(node)
            is_gather = traffic is not None and traffic.kind == GATHERS
            if is_gather or (traffic is None and not weights.isdisjoint(node.all_input_nodes)):
                weights.add(node)
    return frozenset(weights)


def _gradient_nodes(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes whose only transitive users, up to the graph's output, are operators and not loops."""
    output = module.graph.output_node()
    gradients: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and node.users and all(user is output or user in gradients for user in node.users):
            gradients.add(node)
    return frozenset(gradients)


def _exchanged_nodes(module: fx.GraphModule, excluded: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes that exchange rows between ranks, and those that only change the layout of these rows."""
    collectives = {node for node in module.graph.nodes if node not in excluded and traffic_of_node(node) is not None}
    exchanged = set(collectives)
    for node in module.graph.nodes:
        if node.op == "call_function" and _only_moves(node) and not exchanged.isdisjoint(node.all_input_nodes):
            exchanged.add(node)
    for node in reversed(module.graph.nodes):
        if (
            node.op == "call_function"
            and _only_moves(node)
            and node.users
            and exchanged.issuperset(node.users)
            and node not in excluded
        ):
            exchanged.add(node)
    return frozenset(exchanged)


def _only_moves(node: fx.Node) -> bool:
    """Return whether a node only waits for values, moves them, or selects one of several results."""
    is_wait = isinstance(node.target, OpOverload) and node.target.name() in WAIT_NAMES
    return is_wait or node.target in LAYOUT_OPERATORS or node.target is operator.getitem
