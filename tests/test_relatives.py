"""Relatives of the sequence axis: its slices, its padded forms, and concatenations with it.

An axis that a product has twice, as query and key positions, must not be taken for the rows of a block of the sequence.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamfx.ir.axis_table import Atom, Dim
from streamfx.ir.facts import AxisFacts
from streamfx.passes.analysis.axes import _derived_or_source_axes, axes_of
from tests.support.tracing import traced

ROWS = 5


def leaf(*shape: int) -> Tensor:
    return torch.randn(2, *shape, 4, dtype=torch.float64, requires_grad=True)


class Graph:
    """The axes of a function's inputs, before a sequence axis is chosen."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        recorded, _ = traced(lambda *own: function(*own).square().sum(), inputs, chunk_size=2, loss_chunk_size=2)
        self.joint = recorded.facts[-1].joint
        self.axes: AxisFacts = axes_of(self.joint)

    def atom(self, number: int, dim: int) -> Atom:
        (atom,) = self.axes.table.resolve(self.axes.shapes[self.joint.primals[number]][dim])
        return atom

    def joined(self) -> Dim:
        """The concatenated dimension."""
        (node,) = (node for node in self.joint.nodes if node.target is torch.ops.aten.cat.default)
        return self.axes.table.resolve(self.axes.letters[node][1])

    def relatives(self, number: int, dim: int) -> set[Atom]:
        return _derived_or_source_axes({self.atom(number, dim)}, self.axes)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_blocks_are_relatives_of_their_concatenation_and_their_rows_are_not(at: int) -> None:
    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        parts = [y, z]
        parts.insert(at, x.flatten(1, 2))
        return torch.cat(parts, 1).cumsum(1)

    graph = Graph(joined, leaf(2, 3), leaf(ROWS), leaf(ROWS))
    found = graph.relatives(1, 1)
    assert {graph.atom(0, 1), graph.atom(2, 1), *graph.joined()} <= found
    assert found.isdisjoint({graph.atom(0, 0), graph.atom(0, 2), graph.atom(0, 3)})  # batch, rows of a block, features


def test_concatenated_sequences_are_relatives() -> None:
    """A view splits the concatenation into two axes: both are relatives."""

    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([x, y, z.flatten(1, 2)], 1).unflatten(1, (4, ROWS)).cumsum(2)

    graph = Graph(joined, leaf(ROWS), leaf(ROWS), leaf(2, ROWS))
    assert len(graph.joined()) == 2
    found = graph.relatives(0, 1)
    assert {graph.atom(1, 1), *graph.joined()} <= found
    assert graph.atom(2, 2) not in found
