"""Products with a packed weight: rows are kept, and how the weight is packed is the operator's own matter."""

from __future__ import annotations

from streamfx.cost.flops import PACKED
from streamfx.ir.signature import Signature, whole
from streamfx.passes.ops.rules.registry import NAMED, RuleCall


def packed_product(call: RuleCall) -> Signature | None:
    """`x @ unpacked.T`, x [..., k] first: each row of the result needs its own row of x, and all of the other operands."""
    leading = len(call.shape) - 1
    if len(call.shapes[0]) != leading + 1:
        return None
    rows = tuple((letter,) for letter in range(leading))
    contracted, made = leading, leading + 1
    others, used = [], leading + 2
    for shape in call.shapes[1:]:
        others.append(tuple((used + position,) for position in range(len(shape))))
        used += len(shape)
    return Signature(
        operands=((*rows, (contracted,)), *others),
        results=((*rows, (made,)),),
        index=whole(*range(leading, used)),
    )


NAMED.update(dict.fromkeys(PACKED, packed_product))
