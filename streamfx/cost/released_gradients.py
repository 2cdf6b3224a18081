"""A backward half whose gradients are taken while it runs: by an optimizer in the backward pass, which frees each of them.

stretch 0, gradients of the head      taken, and freed, before stretch 1 begins
stretch 1, gradients of layer 3       ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from streamfx.cost.categories import GRADIENTS
from streamfx.cost.gradient_copies import lies_as
from streamfx.cost.meter import Delta, Meter
from streamfx.ir.release_plan import ReleaseSegment
from streamfx.kernels.mask_programs import looking
from streamfx.runtime.expanded_segments import Stretches, stretches_of
from streamfx.runtime.outer import call_of, found_before


@dataclass(frozen=True)
class ReleasedGradients:
    """The stretches of a backward half, the first behind which gradients are handed over, and those that are taken: by their
    place among the results, the position of the input that each is of.
    """

    stretches: Sequence[ReleaseSegment]
    first: int
    taken: dict[int, int]


def run_in_stretches(
    backward: fx.GraphModule, arguments: list[Any], handed: ReleasedGradients, given: Sequence[Any], meter: Meter
) -> None:
    """Run a half, or a copy of it with the same names; `given` are the inputs of the forward half. What is not taken stays."""
    results: dict[int, Any] = {}
    with looking(found_before(arguments)):
        run = _in_stretches(backward, handed)(arguments, results)
        next(run)
        for number, _ in enumerate(run):
            if number >= handed.first:
                _take(results, handed, given, meter)


def _take(results: dict[int, Any], handed: ReleasedGradients, given: Sequence[Any], meter: Meter) -> None:
    """One after the other: autograd copies a gradient that lies otherwise than what it is of."""
    for place in sorted(handed.taken.keys() & results.keys()):
        gradient, value = results.pop(place), given[handed.taken[place]]
        if isinstance(value, Tensor) and gradient.shape == value.shape and not lies_as(gradient, value):
            meter.reached(Delta(gradient.nbytes, {GRADIENTS: gradient.nbytes}))


def _in_stretches(backward: fx.GraphModule, handed: ReleasedGradients) -> Stretches:
    known = {node.name: node for node in backward.graph.nodes}

    def own(delivery: ReleaseSegment) -> ReleaseSegment:
        gradients = {place: known[node.name] for place, node in delivery.gradients.items()}
        return ReleaseSegment(tuple(known[node.name] for node in delivery.operators), (), gradients)

    pairs = [(delivery, [call_of(node, backward) for node in delivery.operators]) for delivery in map(own, handed.stretches)]
    return stretches_of("backward", backward.graph.find_nodes(op="placeholder"), pairs)
