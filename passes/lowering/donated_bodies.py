"""Write sums and products between loops over one of their operands.

The head's gradient is computed in the forward graph and scaled by the loss's tangent in the backward graph; if the
embedding is tied to the head, the lookup's gradient is added. Each of these values is as large as the vocabulary, and
each would be alive together with the previous one.

    scaled = mul(saved, tangent)    ->   scale_saved_in_place(saved, tangent)      one buffer, unless the graph is retained
    both = add(scaled, looked_up)   ->   add_in_place(scaled, looked_up)

Only the result of a loop that has no other user is overwritten.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.node_meta import EXCLUSIVE, VALUE
from streamfx.passes.ops.traits import only_moves_elements
from streamfx.runtime.in_place import OVERWRITES_FIRST, add_in_place, scale_in_place, scale_saved_in_place
from streamfx.runtime.loop import Loop
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
# by operator: the variant that writes over a value of this graph, and the one that writes over a saved value, if any
IN_PLACE: dict[OpOverload, tuple[Callable[..., Tensor], Callable[..., Tensor] | None]] = {
    aten.add.Tensor: (add_in_place, None),
    aten.mul.Tensor: (scale_in_place, scale_saved_in_place),
}


def write_in_place(module: fx.GraphModule) -> None:
    """Replace a host program's sums and products by in-place variants where possible."""
    for node in list(module.graph.nodes):
        if node.target in IN_PLACE and not node.kwargs:
            _write_over_operand(node, module)


def _write_over_operand(node: fx.Node, module: fx.GraphModule) -> None:
    """Replace a sum or product, in place, by the variant that writes over an operand, if an operand may be overwritten.

    Its memory must be a loop's result in this graph, or saved for this graph alone; it has no other user, and the result's
    shape and dtype.
    """
    over_owned, over_saved = IN_PLACE[node.target]  # type: ignore[index]
    left, right = node.args[:2]
    for operand, other in ((left, right), (right, left)):
        if (
            not isinstance(operand, fx.Node)
            or operand is other
            or not _has_same_layout(operand, node)
            or set(operand.users) != {node}
        ):
            continue
        base = find_view_base(operand)
        if is_owned_here(base, module):
            node.target, node.args = over_owned, (operand, other)
            return
        if base.meta.get(EXCLUSIVE, False) and over_saved is not None:
            node.target, node.args = over_saved, (operand, other)
            return


def find_view_base(node: fx.Node) -> fx.Node:
    """Follow a chain of views to the value that they view, as long as each value has no other user."""
    while only_moves_elements(node) and len(node.all_input_nodes[0].users) == 1:
        node = node.all_input_nodes[0]
    return node


def is_owned_here(node: fx.Node, module: Any) -> bool:
    """Return whether this host program allocated a value: it is one of a loop's results, or was itself written in place."""
    if node.target in OVERWRITES_FIRST:
        return True
    if node.target is not operator.getitem:
        return False
    producer = node.args[0]
    return (
        isinstance(producer, fx.Node) and producer.op == "call_module" and isinstance(module.get_submodule(producer.target), Loop)
    )


def _has_same_layout(operand: fx.Node, result: fx.Node) -> bool:
    """Return whether a result has the shape and dtype of an operand whose elements do not overlap in memory."""
    operand_value, result_value = operand.meta.get(VALUE), result.meta.get(VALUE)
    if not isinstance(operand_value, Tensor) or not isinstance(result_value, Tensor):
        return False
    return (
        operand_value.shape == result_value.shape
        and operand_value.dtype == result_value.dtype
        and 0 not in operand_value.stride()
    )
