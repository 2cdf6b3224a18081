"""From AOTAutograd's joint graph to ours and back: what `partition_fn` is given and has to return."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence

import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.joint import joint_graph
from streamfx.ir.pieces import Pieces
from streamfx.torch_private import FakeTensor, unset_fake_temporarily


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
    _inline_constants(graph, module)
    output = graph.output_node()
    flat = torch.utils._pytree.tree_leaves(output.args[0], is_leaf=lambda item: item is None)
    output.args = (tuple(flat),)
    joint = joint_graph(graph, num_primals, num_outputs)
    for position in static_inputs:
        if position < len(joint.primals):
            joint.primals[position].meta["streamfx_static_address"] = True
    for position, pieces in (known_masks or {}).items():
        joint.primals[position].meta["streamfx_pattern"] = pieces
    return Facts(joint)


class Constant:
    """A tensor that was written into the traced function, as an operator without operands."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        self.__name__ = self.__qualname__ = name
        self.value = value

    def __call__(self) -> torch.Tensor:
        return self.value


def _inline_constants(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Replace attributes of the module: by a number where that is all they hold, so that masks can be read."""
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        with graph.inserting_before(node), unset_fake_temporarily():
            if value.dim() == 0 and not isinstance(value, FakeTensor):
                keywords = {"dtype": value.dtype, "device": value.device}
                made = graph.call_function(torch.ops.aten.full.default, ([], value.item()), keywords)
            else:
                made = graph.call_function(Constant(str(node.target), value))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
