"""Recurrences, those that `passes/recurrences/detection.py` has found and scans: their rows follow one another."""

from __future__ import annotations

from streamfx.ir.signature import Scan, Signature, whole
from streamfx.passes.operators.rules.registry import Call, rule
from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.recurrences import Recurrence, Unrolled
from streamfx.runtime.scanned import Scanned
from streamfx.runtime.stateful import Backward, Forward


@rule(Unrolled, Scanned, Forward, Backward, Associative, AssociativeBackward)
def recurrence(call: Call) -> Signature:
    """Whole along all axes but that of the steps, which a loop in their direction carries along."""
    run: Recurrence = call.node.target  # type: ignore[assignment]
    axes = run.axes
    letters = Signature(axes.operands, axes.results).letters()
    return Signature(axes.operands, axes.results, {**whole(*letters), axes.rows: Scan(run.reverse)})
