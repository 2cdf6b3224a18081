"""Convert AOTAutograd's joint graph (forward and backward in one graph) to the first `Facts`.

`Facts` is the record that the passes extend: each pass takes one, and returns one with its own results added. The copied graph is
separate from its module, so constants and marks of inputs are stored in `node.meta`.
"""

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
    """Return the initial facts of the pipeline: a copy of a joint (or forward-only) graph, with marks on its inputs.

    `num_primals` inputs are of the forward graph (the others are tangents), `num_outputs` outputs are of the forward graph.
    `static_inputs` are the indices of parameters and buffers, counting only inputs that are no Python objects, as AOTAutograd
    does (2.13). `known_masks` maps indices of inputs, counting all, to the known values of a mask or table (`Pieces`).
    `mutated_inputs` are indices of inputs that the graph writes to; None if unknown: then all primals count as written.
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
    for tensor_index in static_inputs:
        if tensor_index < len(tensor_inputs):
            tensor_inputs[tensor_index].meta[STATIC_ADDRESS] = True
    for primal_index in range(num_primals) if mutated_inputs is None else mutated_inputs:
        joint.primals[primal_index].meta[MUTATED] = True
    for input_index, pieces in (known_masks or {}).items():
        joint.inputs[input_index].meta[PATTERN] = pieces
    return Facts(joint)


def _inline_numbers(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Replace each `get_attr` of a zero-dimensional tensor of `module` by `full([], number)`.

    The passes can then evaluate masks that are computed from it. Nested graphs and fake tensors stay.
    """
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
    """Store the value of a `get_attr` node in its meta, because the copied graph has no module that holds it.

    A nested graph is stored as `GRAPH`. A tensor is stored as `CONSTANT`, and if its values follow a known pattern, such as a
    causal mask, this is stored as `PATTERN`.
    """
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
