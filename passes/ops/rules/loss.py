"""Rules of losses. `canonicalize` rewrites means over tokens into sums and a count before these rules apply."""

from __future__ import annotations

import torch

from streamfx.ir.signature import LetterDim, LetterShape, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(call: RuleCall) -> Signature | None:
    """Map (log-probabilities [n, v, ...], labels [n, ...], weight [v]?) to (loss, total weight)."""
    reduction = call.arguments()["reduction"]
    if len(call.shapes[0]) < 2:
        return None
    scores, labels, v = _score_letters(len(call.shapes[0]))
    weight = ((v,),) * (len(call.operands) - 2)
    rows = [letter for dim in labels for letter in dim] if reduction == MEAN else []
    return Signature((scores, labels, *weight), (labels if reduction == NONE else (), ()), full_axes(*v, *rows))


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(call: RuleCall) -> Signature | None:
    """Map (gradient, log-probabilities [n, v, ...], labels [n, ...], weight [v]?, total weight) to [n, v, ...]."""
    if len(call.shapes[1]) < 2:
        return None
    scores, labels, v = _score_letters(len(call.shapes[1]))
    gradient = labels if call.shapes[0] else ()
    weight = ((v,),) * (len(call.operands) - 4)
    return Signature((gradient, scores, labels, *weight, ()), (scores,), full_axes(*v))


def _score_letters(rank: int) -> tuple[LetterShape, LetterShape, LetterDim]:
    """Return the axis labels of scores [n, v, ...], of labels [n, ...], and of v."""
    labels = ((0,), *((i,) for i in range(2, rank)))
    return ((0,), (1,), *((i,) for i in range(2, rank))), labels, (1,)
