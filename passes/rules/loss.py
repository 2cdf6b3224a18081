"""Loss operators. Means over tokens are rewritten into sums and a count by `canonicalize` before they get here."""

from __future__ import annotations

import torch

from streamfx.passes.rules.registry import Call, Signature, rule

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


@rule(aten.nll_loss_forward.default)
def nll_loss_forward(call: Call) -> Signature | None:
    """(log-probabilities [n, v], labels [n], weight [v]?) to (loss, total weight)."""
    reduction = call.arguments()["reduction"]
    if len(call.shapes[0]) != 2:
        return None
    n, v = (0,), (1,)
    weight = ((v,),) * (len(call.operands) - 2)
    whole = frozenset(v) | (frozenset(n) if reduction == MEAN else frozenset())
    return Signature(((n, v), (n,), *weight), ((n,) if reduction == NONE else (), ()), whole=whole)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(call: Call) -> Signature | None:
    """(gradient, log-probabilities [n, v], labels [n], weight [v]?, total weight) to [n, v]."""
    if len(call.shapes[1]) != 2:
        return None
    n, v = (0,), (1,)
    gradient = ((n,),) if call.shapes[0] else ((),)
    weight = ((v,),) * (len(call.operands) - 4)
    return Signature((*gradient, (n, v), (n,), *weight, ()), ((n, v),), whole=frozenset(v))
