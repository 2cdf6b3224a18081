"""The peak and the curve of a step whose graphs run in order, and whose backward graphs run in reverse order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamfx.cost.categories import BETWEEN_GRAPHS, GRADIENTS
from streamfx.cost.curve import Curve, Point
from streamfx.cost.memory import Cost, bytes_like
from streamfx.ir.joint import JointGraph, is_parameter
from streamfx.node_meta import VALUE


def peak_of_calls(costs: Sequence[Cost], gradients: Sequence[int]) -> int:
    """Return the peak bytes of a step: each graph's saved values stay until its backward graph has run.

    `gradients` are the bytes of each graph's parameter gradients; the next backward graph consumes the other gradients.
    """
    peak = held = gradient_bytes = 0
    for cost in costs:
        peak = max(peak, held + cost.forward_peak)
        held += cost.held
    for cost, size in zip(reversed(costs), reversed(gradients), strict=True):
        held -= cost.held
        peak = max(peak, held + cost.backward_peak + gradient_bytes)
        gradient_bytes += size
    return peak


def bytes_of_parameters(joint: JointGraph) -> int:
    """Return the bytes of the gradients of a graph's parameters."""
    return sum(bytes_like(primal.meta[VALUE]) for _, primal, _ in joint.trained if is_parameter(primal))


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
