"""A backward graph in segments, and the gradients that are complete after each segment.

Between two segments, these gradients are released: passed to autograd before the whole backward graph has run, so that an
optimizer or a reduction over ranks may use and free them.
"""

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
    """A segment of a backward graph: its operators, and the gradients to release after it, by index among the graph's results.

    `reads`: the saved tensors that it reads and that other code may write to; a write to one of them is an error.
    """

    operators: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gradients: dict[int, fx.Node]


@dataclass(frozen=True)
class GradientSource:
    """The input whose gradient a backward result is: its index in Dynamo's compiled function, and in AOTAutograd's graph.

    The indices differ if there are sharded tensors, of which the graph gets the local shards. If this input is one, `part`
    describes the local shard of the gradient; else it is None.
    """

    input_index: int
    primal_index: int
    part: ShardedGradient | None = None


@dataclass(frozen=True)
class ShardedGradient:
    """The local shard of a sharded gradient: the one tensor from which autograd's gradient is built."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def placeholder(self) -> Tensor:
        """Return a tensor of this shape over one element, to use until the gradient exists."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


Sources: TypeAlias = "dict[int, GradientSource]"  # by index among the results of a backward graph


def sources_of(joint: fx.Graph, num_outputs: int, num_inputs: int) -> Sources:
    """Return the input to which each gradient in a joint graph belongs, by index among the gradients that are tensors.

    `num_inputs` counts the inputs of Dynamo's function. Return {}, so that nothing is released early, if AOTAutograd has
    merged inputs, or if a sharded gradient consists of several tensors or has dynamic sizes.
    """
    gradients = outputs_of(joint)[num_outputs:]
    input_indices = owner_indices(joint)  # by index of a placeholder: the Dynamo input that it is, or is a shard of
    gradient_inputs = inputs_of_gradients(joint, num_outputs)
    if gradient_inputs is None or {index for index in input_indices if index is not None} != set(range(num_inputs)):
        return {}
    placeholder_index = {node: i for i, node in enumerate(joint.find_nodes(op="placeholder"))}
    sources: Sources = {}
    seen_inputs: set[int] = set()
    for result_index, (primal, gradient) in enumerate(zip(gradient_inputs, gradients, strict=True)):
        if not is_tensor(gradient):
            continue
        input_index = None if primal is None else input_indices[placeholder_index[primal]]
        is_part = primal is not None and is_inner_tensor(primal)
        part = _sharded_part(gradient) if is_part else None
        if primal is None or input_index is None or input_index in seen_inputs or (is_part and part is None):
            return {}
        seen_inputs.add(input_index)
        sources[result_index] = GradientSource(input_index, placeholder_index[primal], part)
    return sources


def _sharded_part(gradient: fx.Node) -> ShardedGradient | None:
    """Return the shape, dtype, and device of the local shard of a gradient; None if it has dynamic sizes."""
    value = gradient.meta[VALUE]
    shape = shape_of(value)
    sizes = tuple(size for size in shape if isinstance(size, int))
    return ShardedGradient(sizes, value.dtype, value.device) if len(sizes) == len(shape) else None


def released_indices(segments: Sequence[ReleaseSegment]) -> tuple[tuple[int, ...], ...]:
    """Return the indices, among the backward graph's results, of the gradients that each segment releases, in order."""
    return tuple(tuple(sorted(segment.gradients)) for segment in segments)
