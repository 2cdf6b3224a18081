"""A backward half in stretches, each of which ends where gradients are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx

from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.sizes import shape_of
from streamfx.node_meta import VALUE
from streamfx.torch_private import inputs_of_gradients
from streamfx.torch_private.autograd import is_taken_apart, owners

Saved: TypeAlias = "tuple[frozenset[int], ...]"  # for each tensor saved for a backward half: inputs in whose memory it may lie


@dataclass(frozen=True)
class ReleaseSegment:
    """A stretch of a backward half: the operators that run, which of the given tensors they read that somebody else may write to,
    and the gradients that are handed over behind them, by their place among the half's results.
    """

    operators: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gradients: dict[int, fx.Node]


@dataclass(frozen=True)
class GradientSource:
    """Which input a result of a backward half is the gradient of: by its position among those of the compiled function, and among
    those of the graph, where a sharded tensor is taken apart; then the result is a `part` of a gradient.
    """

    given: int
    primal: int
    part: ShardedGradient | None = None


@dataclass(frozen=True)
class ShardedGradient:
    """The one tensor that a sharded gradient is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stand_in(self) -> Tensor:
        """A tensor of these sizes in the memory of one number, until the gradient is there."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


Sources: TypeAlias = "dict[int, GradientSource]"  # by place among the results of a backward half


def sources_of(joint: fx.Graph, num_outputs: int, num_inputs: int) -> Sources:
    """For each gradient that is a tensor; none where AOTAutograd has put inputs together, or a gradient is made of several
    tensors or of sizes that change.
    """
    given, gradients = owners(joint), outputs_of(joint)[num_outputs:]
    told = inputs_of_gradients(joint, num_outputs)
    if told is None or {position for position in given if position is not None} != set(range(num_inputs)):
        return {}
    number = {node: i for i, node in enumerate(joint.find_nodes(op="placeholder"))}
    found, seen = dict[int, GradientSource](), set[int]()
    for place, (primal, gradient) in enumerate(zip(told, gradients, strict=True)):
        if not is_tensor(gradient):
            continue
        position = None if primal is None else given[number[primal]]
        is_part = primal is not None and is_taken_apart(primal)
        part = _part(gradient) if is_part else None
        if primal is None or position is None or position in seen or (is_part and part is None):
            return {}
        seen.add(position)
        found[place] = GradientSource(position, number[primal], part)
    return found


def _part(gradient: fx.Node) -> ShardedGradient | None:
    value = gradient.meta[VALUE]
    shape = shape_of(value)
    sizes = tuple(size for size in shape if isinstance(size, int))
    return ShardedGradient(sizes, value.dtype, value.device) if len(sizes) == len(shape) else None


def places_of(deliveries: Sequence[ReleaseSegment]) -> tuple[tuple[int, ...], ...]:
    """Which gradients each stretch hands over."""
    return tuple(tuple(sorted(delivery.gradients)) for delivery in deliveries)
