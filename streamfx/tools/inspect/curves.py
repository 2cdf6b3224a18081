"""The memory curve of a whole step: the graphs run in order, then their backward graphs in reverse order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamfx.cost.categories import BETWEEN_GRAPHS, GRADIENTS
from streamfx.cost.curve import Curve, Point
from streamfx.cost.memory import Cost


def curve_of_calls(costs: Sequence[Cost], gradients: Sequence[int], at_end: int = 0) -> Curve:
    """Concatenate the curves of several graph calls, as `peak_of_calls` adds up their peaks.

    `gradients` are the bytes of each graph's parameter gradients. At least `at_end` bytes are alive at the end of the step.
    """
    curve, held_bytes, gradient_bytes = Curve(), 0, 0
    for cost in costs:
        curve = curve.concatenated(cost.forward_curve.shifted(curve.work, _nonzero({BETWEEN_GRAPHS: held_bytes})))
        held_bytes += cost.held
    curve = replace(curve, backward_start=curve.work)
    for cost, size in zip(reversed(costs), reversed(gradients), strict=True):
        held_bytes -= cost.held
        curve = curve.concatenated(
            cost.backward_curve.shifted(curve.work, _nonzero({BETWEEN_GRAPHS: held_bytes, GRADIENTS: gradient_bytes}))
        )
        gradient_bytes += size
    if at_end > (curve.points[-1].total if curve.points else 0):
        curve = curve.concatenated(Curve((Point(curve.work, {GRADIENTS: at_end}),), (), curve.work))
    return curve.shortened()


def curve_of_call(cost: Cost) -> Curve:
    """Return the curve of a single forward and backward pass in eager mode."""
    forward = cost.forward_curve
    return (
        replace(forward, backward_start=forward.backward_start or forward.work)
        .concatenated(cost.backward_curve.shifted(forward.work))
        .shortened()
    )


def _nonzero(sizes: dict[str, int]) -> dict[str, int]:
    """Return the categories with a nonzero size."""
    return {name: size for name, size in sizes.items() if size}
