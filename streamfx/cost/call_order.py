"""The memory of a step whose graphs run in order, and whose backward graphs run in reverse order."""

from __future__ import annotations

from collections.abc import Sequence

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
