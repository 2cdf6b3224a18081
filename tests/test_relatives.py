"""Which axes are relatives of the sequence: cut out of it, padded around it, or joined of parts of it?

Where an axis stands twice in a product, as rows and keys do, that has to be told from the rows of a block of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.axis_table import Atom, Dim
from streamfx.ir.facts import AxisFacts, known
from streamfx.passes.analysis.axes import _relatives, axes_of
from tests.support.exactness import compare
from tests.support.tracing import traced

BLOCK, BLOCKS, ROWS = 3, 2, 5


def blocks() -> Tensor:
    """[b n l d], as a batch of its own."""
    return torch.randn(2, BLOCKS, BLOCK, 4, dtype=torch.float64, requires_grad=True)


def rows() -> Tensor:
    return torch.randn(2, ROWS, 4, dtype=torch.float64, requires_grad=True)


class Graph:
    """The axes of a function's inputs, before a sequence is chosen."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        recorded, _ = traced(lambda *own: function(*own).square().sum(), inputs, chunk_size=2, loss_chunk_size=2)
        self.joint = recorded.facts[-1].joint
        self.axes: AxisFacts = axes_of(self.joint)

    def atom(self, number: int, dim: int) -> Atom:
        (atom,) = self.axes.table.resolve(self.axes.shapes[self.joint.primals[number]][dim])
        return atom

    def joined(self) -> Dim:
        """The dimension that is joined of parts."""
        (node,) = (node for node in self.joint.nodes if node.target is torch.ops.aten.cat.default)
        return self.axes.table.resolve(self.axes.letters[node][1])

    def relatives(self, number: int, dim: int) -> set[Atom]:
        return _relatives({self.atom(number, dim)}, self.axes)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_blocks_are_relatives_of_what_is_joined_of_them_and_their_rows_are_none(at: int) -> None:
    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        parts = [y, z]
        parts.insert(at, x.flatten(1, 2))
        return torch.cat(parts, 1).cumsum(1)

    graph = Graph(joined, blocks(), rows(), rows())
    found = graph.relatives(1, 1)
    assert {graph.atom(0, 1), graph.atom(2, 1), *graph.joined()} <= found
    assert found.isdisjoint({graph.atom(0, 0), graph.atom(0, 2), graph.atom(0, 3)})  # batch, rows of a block, features


def test_several_sequences_side_by_side_are_relatives() -> None:
    """What is joined is shown as sequences of rows afterwards: each of the two axes counts."""

    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([x, y, z.flatten(1, 2)], 1).unflatten(1, (4, ROWS)).cumsum(2)

    graph = Graph(joined, rows(), rows(), torch.randn(2, 2, ROWS, 4, dtype=torch.float64, requires_grad=True))
    assert len(graph.joined()) == 2
    found = graph.relatives(0, 1)
    assert {graph.atom(1, 1), *graph.joined()} <= found
    assert graph.atom(2, 2) not in found


def test_what_is_cut_and_padded_is_a_relative_of_a_relative() -> None:
    def cut(x: Tensor, y: Tensor) -> Tensor:
        return (F.pad(x[:, 1:], (0, 0, 0, 2)) * y).cumsum(1)

    graph = Graph(cut, rows(), torch.randn(2, ROWS + 1, 4, dtype=torch.float64, requires_grad=True))
    assert graph.atom(1, 1) in graph.relatives(0, 1)
    assert graph.atom(0, 1) in graph.relatives(1, 1)
    assert graph.atom(0, 2) not in graph.relatives(0, 1)


class Inside(nn.Module):
    """Attention inside of blocks of rows; a row in front of the first, and rows behind the last, are joined to it as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.q, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        whole = x.shape[1] - (x.shape[1] - 1) % BLOCK
        parts = x[:, 1:whole].unflatten(1, (-1, BLOCK))
        q = self.q(parts)
        mixed = (q @ q.mT).tril().softmax(-1) @ parts
        x = x + self.out(torch.cat([x[:, :1], mixed.flatten(1, 2), x[:, whole:]], 1))
        return F.cross_entropy(self.head(x.cumsum(1)).flatten(0, 1), labels.flatten())


def test_rows_of_blocks_that_are_joined_are_no_sequence() -> None:
    ids = torch.randint(11, (2, 15), generator=torch.Generator().manual_seed(0))
    report = compare(Inside().double(), {"ids": ids, "labels": ids}, chunk_size=6, also=(1, 7, 64), streams=None)
    assert known(known(report.facts[0].found_axes).sequence).length == 15
