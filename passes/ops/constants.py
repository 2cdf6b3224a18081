"""Values whose elements all equal one number by the definition of their operator, such as `aten.full` and `aten.zeros`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments
from streamfx.ir.operator_table import OPERATORS, Kind, is_kind
from streamfx.node_meta import VALUE

aten = torch.ops.aten


def find_fill(node: Any) -> float | None:
    """Return the number that all elements of a value equal, such as 0.0 for `aten.zeros`.

    None if the operator is not a fill, the number is computed at run time, or the value's dtype would round it.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target is aten.scalar_tensor.default:
        return exact_number(node.args[0], node.meta[VALUE].dtype)
    if not is_kind(node, Kind.FILL):
        return None
    return exact_number(bound_arguments(node).get("fill_value", OPERATORS[node.target].fill), node.meta[VALUE].dtype)


def exact_number(value: Any, dtype: torch.dtype) -> float | None:
    """Return a Python scalar, stored in a tensor of this dtype, as a float.

    None if the value is not a bool, int or float, or if the dtype (or float64) does not represent it exactly.
    """
    if not isinstance(value, (int, float)) or dtype.is_complex:
        return None
    if dtype == torch.bool:
        return float(bool(value))
    number = float(value)
    if not dtype.is_floating_point and not (number == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max):
        return None
    return number if number == value or math.isnan(number) else None


def is_zero(node: Any) -> bool:
    """Return whether all elements of a value are +0.0. (Adding -0.0 would keep the sign of a zero.)"""
    fill = find_fill(node)
    return fill == 0.0 and math.copysign(1.0, fill) > 0.0
