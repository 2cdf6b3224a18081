"""A backward graph in segments, and the gradients that are complete after each segment."""

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
from streamfx.torch_private.autograd import is_inner_tensor, owner_indices

Saved: TypeAlias = "tuple[frozenset[int], ...]"  # for each tensor saved for a backward graph, the inputs that it may alias


@dataclass(frozen=True)
class ReleaseSegment:
    """A segment of a backward graph: its operators, the tensors it reads, and the gradients to release after it.

    `reads` holds those tensors among them that other code may write to. `gradients` is keyed by index among the graph's results.
    """

    operators: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gradients: dict[int, fx.Node]


@dataclass(frozen=True)
class GradientSource:
    """The input whose gradient a backward result is, by index in the compiled function and in the graph.

    The indices differ if a sharded tensor is decomposed; then the result is a `part` of a gradient.
    """

    input_index: int
    primal_index: int
    part: ShardedGradient | None = None


@dataclass(frozen=True)
class ShardedGradient:
    """The one tensor from which a sharded gradient is built."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def placeholder(self) -> Tensor:
        """Return a tensor of this shape over one element, to use until the gradient exists."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


Sources: TypeAlias = "dict[int, GradientSource]"  # by index among the results of a backward graph


def sources_of(joint: fx.Graph, num_outputs: int, num_inputs: int) -> Sources:
    """Return the source of each gradient that is a tensor.

    Return no sources if AOTAutograd has merged inputs, or if a gradient consists of several tensors or has dynamic sizes.
    """
    input_positions, gradients = owner_indices(joint), outputs_of(joint)[num_outputs:]
    gradient_inputs = inputs_of_gradients(joint, num_outputs)
    if gradient_inputs is None or {position for position in input_positions if position is not None} != set(range(num_inputs)):
        return {}
    placeholder_index = {node: i for i, node in enumerate(joint.find_nodes(op="placeholder"))}
    sources, seen_positions = dict[int, GradientSource](), set[int]()
    for result_index, (primal, gradient) in enumerate(zip(gradient_inputs, gradients, strict=True)):
        if not is_tensor(gradient):
            continue
        position = None if primal is None else input_positions[placeholder_index[primal]]
        is_part = primal is not None and is_inner_tensor(primal)
        part = _sharded_part(gradient) if is_part else None
        if primal is None or position is None or position in seen_positions or (is_part and part is None):
            return {}
        seen_positions.add(position)
        sources[result_index] = GradientSource(position, placeholder_index[primal], part)
    return sources


def _sharded_part(gradient: fx.Node) -> ShardedGradient | None:
    """Return the description of the one tensor in a sharded gradient; None if it has dynamic sizes."""
    value = gradient.meta[VALUE]
    shape = shape_of(value)
    sizes = tuple(size for size in shape if isinstance(size, int))
    return ShardedGradient(sizes, value.dtype, value.device) if len(sizes) == len(shape) else None


def released_indices(segments: Sequence[ReleaseSegment]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the gradients that each segment releases."""
    return tuple(tuple(sorted(segment.gradients)) for segment in segments)
