"""What the bytes are for that operators between loops make: the terms of the values of an outer graph.

all_gather(shard)                       whole weights
all_to_all(queries), and its layout     exchanged rows
attention(queries, keys, values)        whole attention
reduce_scatter(gradient of a weight)    gradients: what leads to results of the backward half alone
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from streamfx.cost.categories import ATTENTION, EXCHANGED, GRADIENTS, WEIGHTS
from streamfx.cost.comm import GATHERS, sent_by_node
from streamfx.cost.flops import is_fused_attention
from streamfx.runtime.outer import COPIES_WHERE_NEEDED
from streamfx.runtime.restride import LIES_AS_TRACED
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
MOVES = (aten.clone.default, aten.reshape.default, aten.view.default, aten.permute.default, aten.transpose.int, *LIES_AS_TRACED)
WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional_autograd::wait_tensor")


def terms_between(module: fx.GraphModule, is_backward: bool) -> dict[str, str]:
    """By name the term of each node of an outer graph that is no loop, and whose bytes are known to be for something."""
    weights = whole_weights(module)
    gradients = _gradients(module) if is_backward else frozenset()
    exchanged = _exchanged(module, weights | gradients)
    attention = (node for node in module.graph.nodes if node.op == "call_function" and is_fused_attention(node.target))
    found = dict.fromkeys(exchanged, EXCHANGED) | dict.fromkeys(attention, ATTENTION)
    found |= dict.fromkeys(gradients, GRADIENTS) | dict.fromkeys(weights, WEIGHTS)
    return {node.name: term for node, term in found.items()}


def makes_memory(node: fx.Node) -> bool:
    """Whether a node calls an operator that may make a value of its own; views that copy where they must stay as they are."""
    return node.op == "call_function" and node.target not in COPIES_WHERE_NEEDED and not getattr(node.target, "is_view", False)


def whole_weights(module: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes that gather weights, or put gathered ones together: what is made of the graph's inputs alone from a gather on."""
    given = set(module.graph.find_nodes(op="placeholder"))
    made, found = set(given), set[fx.Node]()
    for node in module.graph.nodes:
        is_operator = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if is_operator and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
            sent = sent_by_node(node)
            is_gather = sent is not None and sent.kind == GATHERS
            if is_gather or (sent is None and not found.isdisjoint(node.all_input_nodes)):
                found.add(node)
    return frozenset(found)


def _gradients(module: fx.GraphModule) -> frozenset[fx.Node]:
    """What only leads to results, with no loop on the way."""
    output = module.graph.output_node()
    found: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and node.users and all(user is output or user in found for user in node.users):
            found.add(node)
    return frozenset(found)


def _exchanged(module: fx.GraphModule, others: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Rows that ranks send to each other, and the same laid out before and behind."""
    sent = {node for node in module.graph.nodes if node not in others and sent_by_node(node) is not None}
    found = set(sent)
    for node in module.graph.nodes:
        if node.op == "call_function" and _moves(node) and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and _moves(node) and node.users and found.issuperset(node.users) and node not in others:
            found.add(node)
    return frozenset(found)


def _moves(node: fx.Node) -> bool:
    is_wait = isinstance(node.target, OpOverload) and node.target.name() in WAITS
    return is_wait or node.target in MOVES or node.target is operator.getitem
