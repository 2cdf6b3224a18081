"""The sequence length of a graph."""

from __future__ import annotations

from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_tensor
from streamfx.ir.sizes import Size, shape_of
from streamfx.node_meta import VALUE
from streamfx.torch_private.symbolic_sizes import size_hint


def sequence_length(facts: Facts) -> int | None:
    """Return the number of rows of the sequence in this call."""
    if facts.found_axes is None or facts.axes.sequence is None:
        return None
    length = facts.axes.sequence.length
    return length if isinstance(length, int) else _traced_value(length, facts)


def _traced_value(size: Size, facts: Facts) -> int | None:
    """Return the value of a symbolic size at trace time, from an input whose shape contains it."""
    for node in facts.joint.sources:
        if not is_tensor(node):
            continue
        value = node.meta[VALUE]
        for dimension, symbolic in zip(value.shape, shape_of(value), strict=True):
            if symbolic == size:
                return size_hint(dimension)
    return None
