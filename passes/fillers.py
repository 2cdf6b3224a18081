"""Values all of whose elements are one number, because the operator says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments

aten = torch.ops.aten

FILLERS: dict[Any, float | None] = {  # None: the number is an argument
    aten.full.default: None,
    aten.full_like.default: None,
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
}


def fill_of(node: Any) -> float | None:
    """The number that all elements are; None where there is no such number, or it is not known before the run."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target is aten.scalar_tensor.default:
        return _number(node.args[0])
    return None if node.target not in FILLERS else _number(bound_arguments(node).get("fill_value", FILLERS[node.target]))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def is_zero(node: Any) -> bool:
    return fill_of(node) == 0.0
