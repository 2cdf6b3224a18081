"""Axis rules of grouped matrix products: each row selects its weight; rows are kept, or summed into one product per group.

Labels are integers, one per dimension. A label of operands alone is summed; one in `full_axes` cannot be computed in slices.
"""

from __future__ import annotations

from streamfx.dialect.products import GROUPED_MM, GROUPED_OUTER
from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule, signatures

signatures({GROUPED_MM: "s k, e! k n, s -> s n"})


@rule(GROUPED_OUTER)
def grouped_outer(call: RuleCall) -> Signature:
    """Axis rule of (x [s, k], y [s, n], group of each row [s]) -> x.T @ y per group [e, k, n], summed over rows."""
    s, k, n, e = range(4)
    return Signature((((s,), (k,)), ((s,), (n,)), ((s,),)), (((e,), (k,), (n,)),), index=full_axes(e))
