"""The memory of a step whose graphs run one after the other and back."""

from __future__ import annotations

from collections.abc import Sequence

from streamfx.cost.memory import Cost, bytes_like
from streamfx.ir.joint import JointGraph, is_parameter
from streamfx.node_meta import VALUE


def peak_of_calls(costs: Sequence[Cost], gradients: Sequence[int]) -> int:
    """Bytes at most when graphs run one after the other and back: what one leaves stays until its backward half has run.

    `gradients` are the bytes of each graph's gradients of parameters; other gradients are handed on and not counted twice.
    """
    peak = held = later = 0
    for cost in costs:
        peak = max(peak, held + cost.forward_peak)
        held += cost.held
    for cost, own in zip(reversed(costs), reversed(gradients), strict=True):
        held -= cost.held
        peak = max(peak, held + cost.backward_peak + later)
        later += own
    return peak


def bytes_of_parameters(joint: JointGraph) -> int:
    """Bytes of the gradients of a graph's parameters."""
    return sum(bytes_like(primal.meta[VALUE]) for _, primal, _ in joint.trained if is_parameter(primal))
