"""Rules of products with a packed (quantized) weight: rows are kept, and the packed layout is opaque."""

from __future__ import annotations

from streamfx.cost.flops import PACKED
from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RULES_BY_NAME, RuleCall


def packed_product(call: RuleCall) -> Signature | None:
    """`x @ unpacked.T`, with x [..., k] first: each row of the result needs the same row of x, and the other operands
    in full.
    """
    leading = len(call.shape) - 1
    if len(call.shapes[0]) != leading + 1:
        return None
    rows = tuple((letter,) for letter in range(leading))
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
