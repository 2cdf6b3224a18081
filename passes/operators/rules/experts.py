"""Products in which each row chooses its weight: rows are kept, or summed into one product per group."""

from __future__ import annotations

from streamfx.ir.signature import Signature, whole
from streamfx.passes.operators.rules.registry import Call, rule, signatures
from streamfx.runtime.experts import GROUPED_MM, GROUPED_OUTER

signatures({GROUPED_MM: "s k, e! k n, s -> s n"})


@rule(GROUPED_OUTER)
def grouped_outer(call: Call) -> Signature:
    s, k, n, e = range(4)
    return Signature((((s,), (k,)), ((s,), (n,)), ((s,),)), (((e,), (k,), (n,)),), index=whole(e))
