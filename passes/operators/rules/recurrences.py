"""Recurrences that `passes/recurrences/detection.py` has found: their rows follow one another like those of a scan."""

from __future__ import annotations

from streamfx.ir.signature import Scan, Signature, whole
from streamfx.passes.operators.rules.registry import Call, rule
from streamfx.runtime.recurrences import Recurrence


@rule(Recurrence)
def recurrence(call: Call) -> Signature:
    """Whole along all axes but that of the steps, which a loop in their direction carries along."""
    plan = call.node.target.plan  # type: ignore[union-attr]
    axes = plan.axes
    letters = Signature(axes.operands, axes.results).letters()
    return Signature(axes.operands, axes.results, {**whole(*letters), axes.rows: Scan(plan.own.reverse)})
