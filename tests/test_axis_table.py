"""AxisTable against index arithmetic: what it calls equal has to be equal for every index."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfx.ir.axis_table import AxisTable, Dim

factors = st.lists(st.sampled_from([1, 2, 2, 3, 3, 4, 5]), min_size=1, max_size=5)


def grouped(sizes: list[int], cuts: list[bool]) -> list[int]:
    """Products of neighbours: a new group begins where `cuts` says so."""
    groups: list[int] = []
    for size, cut in zip(sizes, cuts, strict=False):
        if cut or not groups:
            groups.append(size)
        else:
            groups[-1] *= size
    return groups


@st.composite
def two_groupings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    sizes = draw(factors)
    bits = st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))
    return grouped(sizes, draw(bits)), grouped(sizes, draw(bits))


def fresh(table: AxisTable, shape: list[int]) -> tuple[Dim, ...]:
    return tuple(table.fresh(size) for size in shape)


def flat(table: AxisTable, dims: tuple[Dim, ...]) -> Dim:
    return table.resolve([atom for dim in dims for atom in dim])


def index_along(table: AxisTable, dim: Dim, at: dict[int, int]) -> int:
    index = 0
    for atom in table.resolve(dim):
        index = index * int(table.size(atom)) + at[atom]
    return index


# -- fresh, size, resolve


def test_a_dimension_of_size_one_has_no_atoms() -> None:
    table = AxisTable()
    assert table.fresh(1) == ()
    assert table.size_of_dim(()) == 1


def test_equal_sizes_are_not_equal_axes() -> None:
    table = AxisTable()
    assert table.resolve(table.fresh(4)) != table.resolve(table.fresh(4))


# -- regroup: numpy.reshape


@given(two_groupings())
def test_regroup_is_reshape(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    table = AxisTable()
    dims = fresh(table, before)
    regrouped = table.regroup(tuple(atom for dim in dims for atom in dim), after)
    if regrouped is None:
        return
    assert [table.size_of_dim(dim) for dim in regrouped] == after
    atoms = flat(table, dims)
    assert atoms == flat(table, regrouped)
    numbers = np.arange(math.prod(before)).reshape(before)
    reshaped = numbers.reshape(after)
    for indices in product(*(range(int(table.size(atom))) for atom in atoms)):
        at = dict(zip(atoms, indices, strict=True))
        one = tuple(index_along(table, dim, at) for dim in dims)
        other = tuple(index_along(table, dim, at) for dim in regrouped)
        assert numbers[one] == reshaped[other]


def nests(before: list[int], after: list[int]) -> bool:
    """Whether both are products of the same finer factors."""
    edges = sorted({*accumulate(before, int.__mul__), *accumulate(after, int.__mul__)})
    return all(b % a == 0 for a, b in pairwise(edges))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms())
def test_regroup_declines_only_what_does_not_nest(before: list[int], random: object) -> None:
    total = math.prod(before)
    for first in (d for d in range(1, total + 1) if total % d == 0):
        table = AxisTable()
        dims = fresh(table, before)
        after = [first, total // first]
        regrouped = table.regroup(tuple(atom for dim in dims for atom in dim), after)
        assert (regrouped is not None) == nests(before, after), (before, after)


def test_regroup_of_another_number_of_elements_is_declined() -> None:
    table = AxisTable()
    assert table.regroup(table.fresh(6), [3]) is None
    assert table.regroup(table.fresh(6), [6, 2]) is None


# -- unify


@given(two_groupings())
def test_unify_makes_equal(shapes: tuple[list[int], list[int]]) -> None:
    table = AxisTable()
    left, right = (tuple(atom for dim in fresh(table, shape) for atom in dim) for shape in shapes)
    done = table.unify(left, right)
    assert done == nests(*shapes)
    if done:
        assert table.resolve(left) == table.resolve(right)


@given(st.lists(st.integers(2, 6), min_size=1, max_size=3), st.lists(st.integers(2, 6), min_size=1, max_size=3))
def test_a_failed_unify_says_only_what_is_true(left: list[int], right: list[int]) -> None:
    """Outer factors that were matched before it failed have equal strides from the outside."""
    table = AxisTable()
    one, other = (tuple(atom for dim in fresh(table, shape) for atom in dim) for shape in (left, right))
    if math.prod(left) != math.prod(right) or table.unify(one, other):
        return
    for i, (a, b) in enumerate(zip(table.resolve(one), table.resolve(other), strict=False)):
        if a != b:
            shared = set(table.resolve(one)[i:]) & set(table.resolve(other)[i:])
            assert not shared, "an inner factor was matched although an outer one was not"
            break


def test_unify_with_itself() -> None:
    table = AxisTable()
    dim = table.fresh(6)
    assert table.unify(dim, dim)
    assert len(table.resolve(dim)) == 1


@given(st.integers(2, 5))
def test_a_factor_that_stands_twice(size: int) -> None:
    """`(t t)` against `(a b)`: all three are one axis."""
    table = AxisTable()
    (t,), (a,), (b,) = table.fresh(size), table.fresh(size), table.fresh(size)
    assert table.unify((t, t), (a, b))
    assert table.resolve((a,)) == table.resolve((b,)) == table.resolve((t,))


def test_a_factor_that_stands_twice_is_split_once() -> None:
    table = AxisTable()
    (t,) = table.fresh(6)
    parts = tuple(table.fresh(size)[0] for size in (2, 3, 2, 3))
    assert table.unify((t, t), parts)
    assert table.resolve((parts[0],)) == table.resolve((parts[2],))
    assert table.resolve((parts[1],)) == table.resolve((parts[3],))
    assert table.resolve((t,)) == table.resolve(parts[:2])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12))
def test_sizes_never_change_and_equality_is_transitive(pairs: list[tuple[int, int]]) -> None:
    table = AxisTable()
    shapes = [[12], [3, 4], [2, 6], [4, 3], [2, 2, 3], [6, 2], [12], [3, 2, 2]]
    dims = [tuple(atom for dim in fresh(table, shape) for atom in dim) for shape in shapes]
    united: list[tuple[int, int]] = []
    for i, j in pairs:
        if table.unify(dims[i], dims[j]):
            united.append((i, j))
        assert all(table.size_of_dim(table.resolve(dim)) == 12 for dim in dims)
        for a, b in united:
            assert table.resolve(dims[a]) == table.resolve(dims[b])


@pytest.mark.parametrize("shape", [[6, 4], [2, 3, 4], [24]])
def test_unify_after_regroup(shape: list[int]) -> None:
    """Two values that were flattened apart and meet again share all their axes."""
    table = AxisTable()
    one, other = fresh(table, [2, 3, 4]), fresh(table, [2, 3, 4])
    flats = [table.regroup(tuple(a for dim in dims for a in dim), shape) for dims in (one, other)]
    assert flats[0] is not None
    assert flats[1] is not None
    for a, b in zip(*flats, strict=True):
        assert table.unify(a, b)
    assert [table.resolve(dim) for dim in one] == [table.resolve(dim) for dim in other]


# -- blocks of an axis that is kept


def cut_in_blocks(length: int, size: int) -> tuple[AxisTable, Dim, Dim]:
    table = AxisTable()
    rows = table.fresh(length)
    table.keep(rows[0])
    blocks = table.regroup(rows, [length // size, size])
    assert blocks is not None
    return table, rows, (*blocks[0], *blocks[1])


@pytest.mark.parametrize("inside", ["of the blocks", "another"])
def test_blocks_side_by_side_are_the_axis_again(inside: str) -> None:
    """A row's number follows from its block's and its own in there, whatever axis that is."""
    table, rows, (outer, inner) = cut_in_blocks(12, 3)
    own = (inner,) if inside == "of the blocks" else table.fresh(3)
    assert table.regroup((outer, *own), [12]) == (rows,)
    assert table.are_blocks(rows[0], (outer, *own))


@pytest.mark.parametrize("order", ["too few", "turned", "of other blocks"])
def test_what_is_no_row_of_blocks_is_not_the_axis(order: str) -> None:
    table, rows, (outer, inner) = cut_in_blocks(12, 3)
    atoms = {
        "too few": (outer, *table.fresh(2)),
        "turned": (*table.fresh(3), outer),
        "of other blocks": (*table.fresh(4), inner),
    }
    joined = table.regroup(atoms[order], [8 if order == "too few" else 12])
    assert joined is not None and joined != (rows,)
