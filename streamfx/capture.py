"""From AOTAutograd's joint graph to ours and back: what `partition_fn` is given and has to return."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import fx

from streamfx.constants import pattern_of
from streamfx.ir.facts import Facts
from streamfx.ir.joint import joint_graph
from streamfx.ir.pieces import Pieces


def captured(
    module: fx.GraphModule,
    num_primals: int,
    num_outputs: int,
    static_inputs: Sequence[int] = (),
    known_masks: dict[int, Pieces] | None = None,
) -> Facts:
    """A copy of a joint (or forward-only) graph as the facts that the pipeline starts from.

    `static_inputs` are the positions of parameters and buffers among the primals; `known_masks` tells for some of them, by
    position, which constant pattern of rows and keys they hold.
    """
    graph = copy.deepcopy(module.graph)
    output = graph.output_node()
    flat = torch.utils._pytree.tree_leaves(output.args[0], is_leaf=lambda item: item is None)
    output.args = (tuple(flat),)
    for node in graph.find_nodes(op="get_attr"):
        _keep_constant(node, module)
    joint = joint_graph(graph, num_primals, num_outputs)
    for position in static_inputs:
        if position < len(joint.primals):
            joint.primals[position].meta["streamfx_static_address"] = True
    for position, pieces in (known_masks or {}).items():
        joint.primals[position].meta["streamfx_pattern"] = pieces
    return Facts(joint)


def _keep_constant(node: fx.Node, module: fx.GraphModule) -> None:
    """Hold a constant that tracing found in the node itself: the graph's copy has no module to look it up in."""
    value: torch.Tensor = getattr(module, str(node.target))
    node.meta["streamfx_constant"] = value
    node.meta.setdefault("val", value)
    if (pattern := pattern_of(value)) is not None:
        node.meta["streamfx_pattern"] = pattern
