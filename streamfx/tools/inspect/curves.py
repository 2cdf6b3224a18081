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
    found, held, gradient_bytes = Curve(), 0, 0
    for cost in costs:
        found = found.then(cost.forward_curve.above(found.work, _nonzero({BETWEEN_GRAPHS: held})))
        held += cost.held
    found = replace(found, turn=found.work)
    for cost, size in zip(reversed(costs), reversed(gradients), strict=True):
        held -= cost.held
        found = found.then(cost.backward_curve.above(found.work, _nonzero({BETWEEN_GRAPHS: held, GRADIENTS: gradient_bytes})))
        gradient_bytes += size
    if at_end > (found.points[-1].total if found.points else 0):
        found = found.then(Curve((Point(found.work, {GRADIENTS: at_end}),), (), found.work))
    return found.shortened()


def curve_of_call(cost: Cost) -> Curve:
    """Return the curve of a single forward and backward pass in eager mode."""
    forward = cost.forward_curve
    return replace(forward, turn=forward.turn or forward.work).then(cost.backward_curve.above(forward.work)).shortened()


def _nonzero(sizes: dict[str, int]) -> dict[str, int]:
    """Return the categories with a nonzero size."""
    return {name: size for name, size in sizes.items() if size}
