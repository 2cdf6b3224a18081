"""Axis rule of recurrences, whether detected in `passes/scan/recurrences.py` or declared as scans.

Rows are computed in sequence, and a state passes from row to row. Axis labels (integers) name the dimensions.
"""

from __future__ import annotations

from streamfx.ir.signature import RunningSum, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule
from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.chunked_recurrences import Recurrence, UnrolledRecurrence
from streamfx.runtime.custom_scan import StatefulRecurrence


@rule(UnrolledRecurrence, StatefulRecurrence, Associative, AssociativeBackward)
def recurrence(call: RuleCall) -> Signature:
    """Axis rule of a recurrence operator, which itself holds the axis labels of its operands and results.

    All axes are needed in full, except for the axis of steps (`axes.rows`): a loop in the recurrence's direction computes its
    rows chunk by chunk and carries the state (`RunningSum`).
    """
    operator: Recurrence = call.node.target  # type: ignore[assignment]
    axes = operator.axes
    all_labels = Signature(axes.operands, axes.results).labels()
    return Signature(axes.operands, axes.results, {**full_axes(*all_labels), axes.rows: RunningSum(operator.reverse)})
