"""AxisTable against index arithmetic: equal axes are equal for every index."""

import math
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfx.ir.axis_table import AxisTable, Dim


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
    return tuple(atom for size in shape for atom in table.fresh(size))


def nests(before: list[int], after: list[int]) -> bool:
    """Whether both are products of the same finer factors."""
    edges = sorted({*accumulate(before, int.__mul__), *accumulate(after, int.__mul__)})
    return all(b % a == 0 for a, b in pairwise(edges))


@given(two_groupings())
def test_regroup_is_reshape(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    table = AxisTable()
    dims = tuple(table.fresh(size) for size in before)
    regrouped = table.regroup(tuple(atom for dim in dims for atom in dim), after)
    assert (regrouped is not None) == nests(before, after)
    if regrouped is None:
        return
    assert [table.size_of_dim(dim) for dim in regrouped] == after
    atoms = table.resolve([atom for dim in dims for atom in dim])
    assert atoms == table.resolve([atom for dim in regrouped for atom in dim])
    numbers = np.arange(math.prod(before)).reshape(before)
    for indices in product(*(range(int(table.size(atom))) for atom in atoms)):
        at = dict(zip(atoms, indices, strict=True))

        def index(dim: Dim, at: dict[int, int] = at) -> int:
            found = 0
            for atom in table.resolve(dim):
                found = found * int(table.size(atom)) + at[atom]
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


@given(st.lists(st.integers(2, 6), min_size=1, max_size=3), st.lists(st.integers(2, 6), min_size=1, max_size=3))
def test_a_failed_unify_matches_only_equal_strides(left: list[int], right: list[int]) -> None:
    """Outer factors that were matched before it failed have equal strides from the outside."""
    table = AxisTable()
    one, other = fresh(table, left), fresh(table, right)
    if math.prod(left) != math.prod(right) or table.unify(one, other):
        return
    pairs = list(zip(table.resolve(one), table.resolve(other), strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    shared = set(table.resolve(one)[same:]) & set(table.resolve(other)[same:])
    assert not shared, "an inner factor was matched although an outer one was not"


def test_a_factor_that_occurs_twice() -> None:
    """`(t t)` against `(a b)`: all three are one axis, and where both are split, t is split once."""
    table = AxisTable()
    t, a, b = (table.fresh(5) for _ in range(3))
    assert table.unify(t + t, a + b) and table.resolve(a) == table.resolve(b) == table.resolve(t)
    t, parts = table.fresh(6), fresh(table, [2, 3, 2, 3])
    assert table.unify(t + t, parts)
    assert table.resolve(parts[:2]) == table.resolve(parts[2:]) == table.resolve(t)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12))
def test_sizes_never_change_and_equality_is_transitive(pairs: list[tuple[int, int]]) -> None:
    table = AxisTable()
    dims = [fresh(table, shape) for shape in ([12], [3, 4], [2, 6], [4, 3], [2, 2, 3], [6, 2], [12], [3, 2, 2])]
    united: list[tuple[int, int]] = []
    for i, j in pairs:
        if table.unify(dims[i], dims[j]):
            united.append((i, j))
        assert all(table.size_of_dim(table.resolve(dim)) == 12 for dim in dims)
        assert all(table.resolve(dims[a]) == table.resolve(dims[b]) for a, b in united)


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
    atoms = {"b": blocks[0], "i": blocks[1], "m": table.fresh(2), "n": table.fresh(3), "o": table.fresh(4)}
    own = tuple(atom for letter in order for atom in atoms[letter])
    joined = table.regroup(own, [math.prod(int(table.size(atom)) for atom in own)])
    assert joined is not None and (joined == (rows,)) is joins
    assert table.are_blocks(rows[0], own) is joins
