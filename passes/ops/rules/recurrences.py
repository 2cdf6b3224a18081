"""Rules of recurrences, whether detected in `passes/scan/recurrences.py` or declared as scans: rows are computed in
sequence.
"""

from __future__ import annotations

from streamfx.ir.signature import RunningSum, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule
from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.chunked_recurrences import Recurrence, UnrolledRecurrence
from streamfx.runtime.custom_scan import Backward, Forward
from streamfx.runtime.scan import ChunkedScan


@rule(UnrolledRecurrence, ChunkedScan, Forward, Backward, Associative, AssociativeBackward)
def recurrence(call: RuleCall) -> Signature:
    """All axes are needed in full, except for the axis of steps, along which a loop in the right direction carries
    the state.
    """
    run: Recurrence = call.node.target  # type: ignore[assignment]
    axes = run.axes
    letters = Signature(axes.operands, axes.results).letters()
    return Signature(axes.operands, axes.results, {**full_axes(*letters), axes.rows: RunningSum(run.reverse)})
