"""Axis rules of products with a packed (quantized) weight: rows are kept, and the packed layout is opaque.

Labels are integers, one per dimension; a label in `full_axes(...)` is needed in full: the operator cannot run on a slice of
that axis.
"""

from __future__ import annotations

from streamfx.cost.flops import PACKED
from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RULES_BY_NAME, RuleCall


def packed_product(call: RuleCall) -> Signature | None:
    """Axis rule of (x [..., k], packed weight, scales, ...) -> `x @ unpacked.T` [..., n].

    Each row of the result needs the same row of x, and the other operands in full. None if x and the result differ in rank.
    """
    leading = len(call.shape) - 1
    if len(call.shapes[0]) != leading + 1:
        return None
    rows = tuple((label,) for label in range(leading))
    contracted, out = leading, leading + 1
    other_operands, next_label = [], leading + 2
    for shape in call.shapes[1:]:
        other_operands.append(tuple((next_label + position,) for position in range(len(shape))))
        next_label += len(shape)
    return Signature(
        operands=((*rows, (contracted,)), *other_operands),
        results=((*rows, (out,)),),
        index=full_axes(*range(leading, next_label)),
    )


RULES_BY_NAME.update(dict.fromkeys(PACKED, packed_product))
