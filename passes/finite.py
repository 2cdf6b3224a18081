"""Which values are finite numbers by the way they are made: a slope per head, say. They are no masks."""

from __future__ import annotations

import torch
from torch import fx

from streamfx.constants import LARGE
from streamfx.ir.joint import JointGraph, is_tensor, tensor_operands
from streamfx.ir.pieces import NUMBERS, Const
from streamfx.passes.fillers import FILLERS
from streamfx.passes.intervals import STAYS_ORDINARY, filled
from streamfx.passes.linear import MOVES_ELEMENTS

aten = torch.ops.aten

POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
STAYS_FINITE = (
    (STAYS_ORDINARY - {aten.div.Tensor})
    | MOVES_ELEMENTS
    | {
        aten.pow.Scalar,
        aten.pow.Tensor_Tensor,
        aten.reciprocal.default,
        aten.repeat.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.cat.default,
        aten.stack.default,
        aten.cumsum.default,
    }
)


def finite_nodes(joint: JointGraph) -> set[fx.Node]:
    """Integers, positions, constants and buffers of plain numbers, and what operators make of them that know no infinity."""
    finite: set[fx.Node] = set()
    for node in (*joint.sources, *joint.nodes):
        if is_tensor(node) and (_is_start(node) or _is_kept(node, finite)):
            finite.add(node)
    return finite


def _is_start(node: fx.Node) -> bool:
    if node.meta.get("streamfx_pattern") == NUMBERS:
        return True
    dtype: torch.dtype = node.meta["val"].dtype
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        return True
    if node.target in FILLERS:
        fact = filled(node)
        return isinstance(fact, Const) and abs(fact.value) < LARGE
    return node.target in POSITIONS


def _is_kept(node: fx.Node, finite: set[fx.Node]) -> bool:
    if node.target not in STAYS_FINITE or any(isinstance(item, float) and not abs(item) < LARGE for item in node.args):
        return False
    return all(item in finite for item in tensor_operands(node))
