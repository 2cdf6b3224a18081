"""Convert AOTAutograd's joint graph to the facts that the passes start from."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from streamfx.frontend.mask_buffers import pattern_of
from streamfx.ir.facts import Facts
from streamfx.ir.joint import graph_copy, is_object, joint_graph
from streamfx.ir.piecewise import Pieces
from streamfx.node_meta import CONSTANT, GRAPH, KEPT_WITHOUT_USERS, MUTATED, PATTERN, STATIC_ADDRESS, VALUE
from streamfx.passes.ops.collectives import is_wait
from streamfx.runtime.restride import resolve_conj_and_neg
from streamfx.torch_private import FakeTensor, tree_leaves, unset_fake_temporarily


def initial_facts(
    module: fx.GraphModule,
    num_primals: int,
    num_outputs: int,
    static_inputs: Sequence[int] = (),
    known_masks: dict[int, Pieces] | None = None,
    mutated_inputs: Sequence[int] | None = (),
) -> Facts:
    """Return the initial facts of the pipeline: a copy of a joint (or forward-only) graph.

    `static_inputs` are the indices of parameters and buffers, not counting inputs that are objects, as AOTAutograd
    does (2.13). `known_masks` maps indices of inputs, counting all, to their constant mask pattern. `mutated_inputs`
    are inputs that the graph writes to; None if unknown.
    """
    graph = graph_copy(module.graph)
    _inline_numbers(graph, module)
    output = graph.output_node()
    flat = tree_leaves(output.args[0], is_leaf=lambda item: item is None)
    output.args = (tuple(flat),)
    for node in graph.find_nodes(op="get_attr"):
        _keep_constant(node, module)
    for node in graph.nodes:
        if is_wait(node) and not node.users:  # another rank may read the result, and waits for this one
            node.meta[KEPT_WITHOUT_USERS] = True
    joint = joint_graph(graph, num_primals, num_outputs)
    tensor_inputs = [node for node in joint.inputs if not is_object(node)]
    for position in static_inputs:
        if position < len(tensor_inputs):
            tensor_inputs[position].meta[STATIC_ADDRESS] = True
    for position in range(num_primals) if mutated_inputs is None else mutated_inputs:
        joint.primals[position].meta[MUTATED] = True
    for position, pieces in (known_masks or {}).items():
        joint.inputs[position].meta[PATTERN] = pieces
    return Facts(joint)


def _inline_numbers(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Replace scalar constants by their value, so that the passes can read masks computed from them."""
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, fx.GraphModule) or value.dim() > 0 or isinstance(value, FakeTensor):
            continue
        with graph.inserting_before(node), unset_fake_temporarily():
            keywords = {"dtype": value.dtype, "device": value.device}
            literal = graph.call_function(torch.ops.aten.full.default, ([], value.item()), keywords)
        literal.meta = dict(node.meta)
        node.replace_all_uses_with(literal)
        graph.erase_node(node)


def _keep_constant(node: fx.Node, module: fx.GraphModule) -> None:
    """Store a constant or function in its node: the copied graph has no module that holds it."""
    value = operator.attrgetter(str(node.target))(module)
    if isinstance(value, fx.GraphModule):
        node.meta[GRAPH] = value
        return
    with unset_fake_temporarily():
        value = resolve_conj_and_neg(value)
        pattern = pattern_of(value)
    node.meta[CONSTANT] = value
    node.meta.setdefault(VALUE, value)
    if pattern is not None:
        node.meta[PATTERN] = pattern
