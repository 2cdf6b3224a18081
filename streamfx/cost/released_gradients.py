"""A backward graph whose gradients are released while it runs: an optimizer step in the backward frees each of them.

segment 0: gradients of the head        released before segment 1 starts
segment 1: gradients of layer 3         released before segment 2 starts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.cost.categories import GRADIENTS
from streamfx.cost.meter import Delta, Meter
from streamfx.ir.release_plan import ReleaseSegment
from streamfx.kernels.mask_programs import use_mask_cache
from streamfx.runtime.expanded_segments import SegmentGenerator, generate_segments
from streamfx.runtime.outer import code_call_of, mask_cache_of


@dataclass(frozen=True)
class ReleasedGradients:
    """The segments of a backward graph, the index of the first that releases gradients, and the gradients to release.

    `input_of_gradient` maps the index of a gradient among the results to the index of its input.
    """

    segments: Sequence[ReleaseSegment]
    first_released: int
    input_of_gradient: dict[int, int]


def run_in_segments(
    backward: fx.GraphModule, arguments: list[Any], released: ReleasedGradients, inputs: Sequence[Any], meter: Meter
) -> None:
    """Run a backward graph, or a copy with the same names, in segments; gradients that are not released stay in memory.

    `inputs` are the inputs of the forward graph.
    """
    results: dict[int, Any] = {}
    with use_mask_cache(mask_cache_of(arguments)):
        run = _segments_of(backward, released)(arguments, results)
        next(run)
        for segment_index, _ in enumerate(run):
            if segment_index >= released.first_released:
                _release(results, released, inputs, meter)


def _release(results: dict[int, Any], released: ReleasedGradients, inputs: Sequence[Any], meter: Meter) -> None:
    """Remove gradients from `results` one by one; if its layout differs from its input's, autograd copies a gradient."""
    for index in sorted(released.input_of_gradient.keys() & results.keys()):
        gradient, input_value = results.pop(index), inputs[released.input_of_gradient[index]]
        if is_copied(gradient, input_value):
            meter.add_peak(Delta(gradient.nbytes, {GRADIENTS: gradient.nbytes}))


def _segments_of(backward: fx.GraphModule, released: ReleasedGradients) -> SegmentGenerator:
    """Return the generator function that runs the segments of a backward graph; the plan's nodes are looked up by name."""
    nodes_by_name = {node.name: node for node in backward.graph.nodes}

    def in_graph(segment: ReleaseSegment) -> ReleaseSegment:
        """Return a segment with the nodes of this graph in place of the plan's."""
        gradients = {index: nodes_by_name[node.name] for index, node in segment.gradients.items()}
        return ReleaseSegment(tuple(nodes_by_name[node.name] for node in segment.operators), (), gradients)

    segments = [
        (segment, [code_call_of(node, backward) for node in segment.operators]) for segment in map(in_graph, released.segments)
    ]
    return generate_segments("backward", backward.graph.find_nodes(op="placeholder"), segments)


# -- copies by autograd: it copies a gradient before it stores it if the strides differ from those of its input
#    (accumulate_grad.h: obeys_layout_contract)


def largest_copied_bytes(inputs: Iterable[Any], gradients: Iterable[Any]) -> int:
    """Return the bytes of the largest gradient that is copied. Gradients are copied one by one, after all of them exist."""
    copied = (gradient.nbytes for value, gradient in zip(inputs, gradients, strict=False) if is_copied(gradient, value))
    return max(copied, default=0)


def is_copied(gradient: Any, input_value: Any) -> bool:
    """Return whether autograd copies the gradient of an input before it stores it.

    It copies a strided gradient that has not the strides of a dense input, or, if the input is not dense, is not contiguous.
    """
    if not (isinstance(input_value, Tensor) and isinstance(gradient, Tensor) and gradient.layout is torch.strided):
        return False
    if gradient.shape != input_value.shape:
        return False
    if not _is_dense(input_value):
        return not gradient.is_contiguous()
    strides = zip(gradient.shape, gradient.stride(), input_value.stride(), strict=True)
    return any(size != 1 and gradient_stride != value_stride for size, gradient_stride, value_stride in strides)


def _is_dense(value: Tensor) -> bool:
    """Return whether the elements fill memory without overlaps and without gaps."""
    expected_stride = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1):
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True
