"""Axis rules of losses. `canonicalize` rewrites means over tokens into sums and a count before these rules apply.

A rule returns a `Signature`: axis labels (integers) for each dimension of each operand and result. A label of operands alone
is summed; one in `full_axes(...)` is needed in full: the operator cannot run on a slice of that axis.
"""

from __future__ import annotations

from streamfx.ir.operator_table import Kind, of_kind
from streamfx.ir.signature import LabelDim, LabelShape, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of the argument `reduction`


@rule(*of_kind(Kind.LABEL_LOSS))
def nll_loss_forward(call: RuleCall) -> Signature | None:
    """Axis rule of (log-probabilities [n, v, ...], targets [n, ...], weight [v]?) -> (loss, total weight).

    The classes v are needed in full; a mean needs all rows, too. None without the dimension n.
    """
    reduction = call.arguments()["reduction"]
    if len(call.shapes[0]) < 2:
        return None
    scores, targets, v = _label_scores(len(call.shapes[0]))
    weight = ((v,),) * (len(call.operands) - 2)
    rows = [label for dim in targets for label in dim] if reduction == MEAN else []
    return Signature((scores, targets, *weight), (targets if reduction == NONE else (), ()), full_axes(*v, *rows))


@rule(*of_kind(Kind.LABEL_LOSS_BACKWARD))
def nll_loss_backward(call: RuleCall) -> Signature | None:
    """Axis rule of (gradient, log-probabilities [n, v, ...], targets [n, ...], weight [v]?, total weight) -> [n, v, ...].

    The gradient is a scalar, or [n, ...] without reduction. The classes v are needed in full.
    """
    if len(call.shapes[1]) < 2:
        return None
    scores, targets, v = _label_scores(len(call.shapes[1]))
    gradient = targets if call.shapes[0] else ()
    weight = ((v,),) * (len(call.operands) - 4)
    return Signature((gradient, scores, targets, *weight, ()), (scores,), full_axes(*v))


def _label_scores(rank: int) -> tuple[LabelShape, LabelShape, LabelDim]:
    """Return the axis labels of scores [n, v, ...] of this rank, of target classes [n, ...], and of v alone."""
    targets = ((0,), *((i,) for i in range(2, rank)))
    return ((0,), (1,), *((i,) for i in range(2, rank))), targets, (1,)
