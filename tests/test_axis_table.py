"""AxisTable against index arithmetic: equal axes are equal for every index; relatives of the sequence."""

import math
from collections.abc import Callable
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamfx.ir.axis_table import AxisFactor, AxisTable, Dim
from streamfx.ir.facts import AxisFacts
from streamfx.passes.analysis.axes import _derived_or_source_axes, axes_of
from tests.support.tracing import traced


@st.composite
def two_groupings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Products of neighbours among the same factors, in two ways."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 3, 4, 5]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        groups: list[int] = []
        for size in sizes:
            if draw(st.booleans()) or not groups:
                groups.append(size)
            else:
                groups[-1] *= size
        return groups

    return grouped(), grouped()


def fresh(table: AxisTable, shape: list[int]) -> Dim:
    return tuple(factor for size in shape for factor in table.fresh(size))


def nests(before: list[int], after: list[int]) -> bool:
    """Whether both are products of the same finer factors."""
    edges = sorted({*accumulate(before, int.__mul__), *accumulate(after, int.__mul__)})
    return all(b % a == 0 for a, b in pairwise(edges))


@given(two_groupings())
def test_regroup_is_reshape(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    table = AxisTable()
    dims = tuple(table.fresh(size) for size in before)
    regrouped = table.regroup(tuple(factor for dim in dims for factor in dim), after)
    assert (regrouped is not None) == nests(before, after)
    if regrouped is None:
        return
    assert [table.size_of_dim(dim) for dim in regrouped] == after
    factors = table.resolve([factor for dim in dims for factor in dim])
    assert factors == table.resolve([factor for dim in regrouped for factor in dim])
    numbers = np.arange(math.prod(before)).reshape(before)
    for indices in product(*(range(int(table.size(factor))) for factor in factors)):
        at = dict(zip(factors, indices, strict=True))

        def index(dim: Dim, at: dict[int, int] = at) -> int:
            found = 0
            for factor in table.resolve(dim):
                found = found * int(table.size(factor)) + at[factor]
            return found

        assert numbers[tuple(map(index, dims))] == numbers.reshape(after)[tuple(map(index, regrouped))]


@given(two_groupings())
def test_unify_makes_equal(shapes: tuple[list[int], list[int]]) -> None:
    table = AxisTable()
    left, right = (fresh(table, shape) for shape in shapes)
    assert table.resolve(left) != table.resolve(right) or not left, "equal sizes are not equal axes"
    done = table.unify(left, right)
    assert done == nests(*shapes)
    assert not done or table.resolve(left) == table.resolve(right)


def test_a_factor_that_occurs_twice() -> None:
    """`(t t)` against `(a b)`: all three are one axis, and where both are split, t is split once."""
    table = AxisTable()
    t, a, b = (table.fresh(5) for _ in range(3))
    assert table.unify(t + t, a + b) and table.resolve(a) == table.resolve(b) == table.resolve(t)
    t, parts = table.fresh(6), fresh(table, [2, 3, 2, 3])
    assert table.unify(t + t, parts)
    assert table.resolve(parts[:2]) == table.resolve(parts[2:]) == table.resolve(t)


# -- blocks of an axis that is kept: the index of a row follows from those of its block and within it


@pytest.mark.parametrize(
    ("order", "joins"), [("bi", True), ("bn", True), ("bm", False), ("nb", False), ("oi", False)]
)  # blocks, rows inside; others: m of 2, n of 3, o of 4
def test_only_rows_of_blocks_are_the_axis(order: str, joins: bool) -> None:
    table = AxisTable()
    rows = table.fresh(12)
    table.keep(rows[0])
    blocks = table.regroup(rows, [4, 3])
    assert blocks is not None
    factors = {"b": blocks[0], "i": blocks[1], "m": table.fresh(2), "n": table.fresh(3), "o": table.fresh(4)}
    own = tuple(factor for label in order for factor in factors[label])
    joined = table.regroup(own, [math.prod(int(table.size(factor)) for factor in own)])
    assert joined is not None and (joined == (rows,)) is joins
    assert table.are_blocks(rows[0], own) is joins


# -- relatives of the sequence axis: its slices, its padded forms, and concatenations with it

ROWS = 5


def leaf(*shape: int) -> Tensor:
    return torch.randn(2, *shape, 4, dtype=torch.float64, requires_grad=True)


class Graph:
    """The axes of a function's inputs, before a sequence axis is chosen."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        recorded, _ = traced(lambda *own: function(*own).square().sum(), inputs, chunk_size=2, loss_chunk_size=2)
        self.joint = recorded.facts[-1].joint
        self.axes: AxisFacts = axes_of(self.joint)

    def factor(self, number: int, dim: int) -> AxisFactor:
        (factor,) = self.axes.table.resolve(self.axes.shapes[self.joint.primals[number]][dim])
        return factor

    def joined(self) -> Dim:
        """The concatenated dimension."""
        (node,) = (node for node in self.joint.nodes if node.target is torch.ops.aten.cat.default)
        return self.axes.table.resolve(self.axes.labels[node][1])

    def relatives(self, number: int, dim: int) -> set[AxisFactor]:
        return _derived_or_source_axes({self.factor(number, dim)}, self.axes)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_blocks_are_relatives_of_their_concatenation_and_their_rows_are_not(at: int) -> None:
    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        parts = [y, z]
        parts.insert(at, x.flatten(1, 2))
        return torch.cat(parts, 1).cumsum(1)

    graph = Graph(joined, leaf(2, 3), leaf(ROWS), leaf(ROWS))
    found = graph.relatives(1, 1)
    assert {graph.factor(0, 1), graph.factor(2, 1), *graph.joined()} <= found
    assert found.isdisjoint({graph.factor(0, 0), graph.factor(0, 2), graph.factor(0, 3)})  # batch, rows of a block, features


def test_concatenated_sequences_are_relatives() -> None:
    """A view splits the concatenation into two axes: both are relatives."""

    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([x, y, z.flatten(1, 2)], 1).unflatten(1, (4, ROWS)).cumsum(2)

    graph = Graph(joined, leaf(ROWS), leaf(ROWS), leaf(2, ROWS))
    assert len(graph.joined()) == 2
    found = graph.relatives(0, 1)
    assert {graph.factor(1, 1), *graph.joined()} <= found
    assert graph.factor(2, 2) not in found
