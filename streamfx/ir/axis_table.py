"""Axes: the index space of each dimension.

A dimension is a row-major product of axis factors, as in einops' `(b t)`; a dimension of size one has none. Two
dimensions with the same factors share an index space. Only operators establish this; equal sizes never do.

A *kept* factor, such as the sequence, is indivisible. A view that splits it into *blocks* of rows, `[t] -> [c l]` (outer: c
blocks; inner: l rows per block), gets two new factors. They are recorded, but the kept factor is not replaced by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from streamfx.ir.sizes import Size, numeric, product, quotient

AxisFactor: TypeAlias = int
Dim: TypeAlias = "tuple[AxisFactor, ...]"


class AxisTable:
    """Union-find over factors: unified factors are one class, with a representative.

    A factor can be refined into a product of smaller factors, unless `keep` has marked it.
    """

    def __init__(self) -> None:
        """Start without factors. A factor is an index into `_parent` and `_size`."""
        self._kept: set[AxisFactor] = set()  # indivisible factors
        self._blocks: list[tuple[AxisFactor, Dim]] = []  # kept factors, and the axes (outer, inner) into which a view splits them
        self._parent: list[AxisFactor] = []  # the union-find tree: another factor of the same class, or the factor itself
        self._size: list[Size] = []
        self._factors: dict[AxisFactor, Dim] = {}  # the smaller factors, (outer, inner), whose product a refined factor is
        self._resolved: dict[Dim, Dim] = {}  # cache of `resolve`, valid until two axes are unified, or one is split
        self._sizes: dict[Dim, Size] = {}  # always valid: only axes of equal size are unified
        self._elements: dict[tuple[Dim, ...], int] = {}  # cache of `num_elements`, always valid

    def fresh(self, size: Size) -> Dim:
        """Return a new dimension that is not related to any other; it has no factor if its size is one."""
        return () if size == 1 else (self._new(size),)

    def keep(self, factor: AxisFactor) -> None:
        """Mark a factor as indivisible: nothing refines it."""
        self._kept.add(self._root(factor))

    def is_kept(self, factor: AxisFactor) -> bool:
        """Return whether a factor is marked as indivisible."""
        return self._root(factor) in self._kept

    def size(self, factor: AxisFactor) -> Size:
        """Return the number of indices of a factor."""
        return self._size[self._root(factor)]

    def size_of_dim(self, dim: Dim) -> Size:
        """Return the size of a dimension: the product of the sizes of its factors."""
        size = self._sizes.get(dim)
        if size is None:
            size = self._sizes[dim] = product(self.size(factor) for factor in dim)
        return size

    def num_elements(self, shape: tuple[Dim, ...]) -> int:
        """Return the number of elements of a tensor with these dimensions, for typical lengths (`numeric`): to compare costs."""
        elements = self._elements.get(shape)
        if elements is None:
            elements = self._elements[shape] = numeric(product(self.size_of_dim(dim) for dim in shape))
        return elements

    def resolve(self, dim: Sequence[AxisFactor]) -> Dim:
        """Return the dimension in the finest known factors, each as the representative of its class."""
        key = tuple(dim)
        factors = self._resolved.get(key)
        if factors is None:
            factors = self._resolved[key] = tuple(self._finest(key))
        return factors

    def _finest(self, dim: Dim) -> Iterator[AxisFactor]:
        """Yield the finest known factors of a dimension: the factors of each refined factor, in row-major order."""
        for factor in dim:
            root = self._root(factor)
            factors = self._factors.get(root)
            yield from (root,) if factors is None else self.resolve(factors)

    def unify(self, left: Dim, right: Dim) -> bool:
        """Record that both dimensions share an index space; return False if their factors cannot be matched.

        Factors are matched from the outermost in: equal sizes are unified; the larger of two factors is first split into one
        of the smaller's size and the rest. Each matched pair stays unified even if a later pair fails, because a row-major
        index determines its outer factors.
        """
        todo_left, todo_right = list(reversed(self.resolve(left))), list(reversed(self.resolve(right)))  # outermost last
        while todo_left and todo_right:
            left_factor, right_factor = self._next(todo_left), self._next(todo_right)
            if left_factor == right_factor:
                continue
            if self.size(left_factor) == self.size(right_factor):
                self._parent[left_factor] = right_factor
                self._resolved.clear()
                self._kept |= {right_factor} if left_factor in self._kept else set()
                continue
            if self._refine(left_factor, self.size(right_factor)):
                todo_left.extend(reversed(self._factors[left_factor]))
                todo_right.append(right_factor)
            elif self._refine(right_factor, self.size(left_factor)):
                todo_right.extend(reversed(self._factors[right_factor]))
                todo_left.append(left_factor)
            else:
                return False
        return not todo_left and not todo_right

    def regroup(self, factors: Dim, shape: Sequence[Size]) -> tuple[Dim, ...] | None:
        """Return dimensions of sizes `shape` over the same row-major elements as `factors`, as for a view.

        `(b t)` with b=2, t=12 and shape (2, 3, 4) -> `[b t1 t2]`: t is refined into factors, or split into blocks if it is
        kept. None if a size is not a product of consecutive factors, or of divisors of them.
        """
        todo = list(reversed(self.resolve(factors)))  # outermost last
        dims: list[Dim] = []
        for size in shape:
            dim: list[AxisFactor] = []
            remaining = size
            while remaining != 1:
                if not todo:
                    return None
                factor = self._next(todo)
                quotient_size = quotient(remaining, self.size(factor))
                if quotient_size is not None:
                    dim.append(factor)
                    remaining = quotient_size
                elif self._refine(factor, remaining):
                    todo.extend(reversed(self._factors[factor]))
                elif blocks := self._split_kept(factor, remaining):
                    todo.extend(reversed(blocks))
                else:
                    return None
            dims.append(self._merge_blocks(dim))
        return None if todo else tuple(dims)

    def are_blocks(self, factor: AxisFactor, blocks: Dim) -> bool:
        """Return whether a view has split a kept factor into these axes, `blocks` = (outer, inner)."""
        return any(
            self._root(kept) == self._root(factor) and self.resolve(block_axes) == self.resolve(blocks)
            for kept, block_axes in self._blocks
        )

    def block_splits(self) -> list[tuple[AxisFactor, Dim, Dim]]:
        """Return (kept factor, axis of blocks, axis of rows within a block) for each split of a kept factor by a view."""
        return [(self._root(kept), *(self.resolve((a,)) for a in axes)) for kept, axes in self._blocks]  # type: ignore[misc]

    def _split_kept(self, factor: AxisFactor, outer: Size) -> Dim | None:
        """Split a kept factor into `outer` blocks; return (axis of blocks, axis within a block), the same at each call.

        None if the factor is not kept, or if its size is not a multiple of `outer`.
        """
        inner = quotient(self.size(factor), outer)
        if inner is None or factor not in self._kept:
            return None
        for kept, blocks in self._blocks:
            if self._root(kept) == factor and self.size(blocks[0]) == outer:
                return blocks
        self._blocks.append((factor, (self._new(outer), self._new(inner))))
        return self._blocks[-1][1]

    def _merge_blocks(self, dim: list[AxisFactor]) -> Dim:
        """Replace adjacent block axes in a dimension with the kept factor that was split into them: `(c l) -> t`.

        The inner axis may be another axis of the same size, because only the index of a row in its block matters; then
        this pair of axes is also recorded as blocks of the factor.
        """
        for kept_factor, (outer_axis, inner_axis) in list(self._blocks):
            outer, both_axes = self.resolve((outer_axis,)), self.resolve((outer_axis, inner_axis))
            for i in range(len(dim)):
                after_outer = dim[i + len(outer) :]
                if self.resolve(dim[i : i + len(both_axes)]) == both_axes:
                    dim = [*dim[:i], self._root(kept_factor), *dim[i + len(both_axes) :]]
                elif (
                    after_outer
                    and self.resolve(dim[i : i + len(outer)]) == outer
                    and self.size(after_outer[0]) == self.size(inner_axis)
                ):
                    self._blocks.append((kept_factor, (outer_axis, after_outer[0])))
                    dim = [*dim[:i], self._root(kept_factor), *after_outer[1:]]
        return tuple(dim)

    def _next(self, todo: list[AxisFactor]) -> AxisFactor:
        """Pop a factor from a reversed list; resolve it again, because it may have been split or unified since."""
        todo.extend(reversed(self.resolve((todo.pop(),))))
        return todo.pop()

    def _refine(self, factor: AxisFactor, outer: Size) -> bool:
        """Split a factor into two factors, the outer one of size `outer`; return False if it is kept, or not divisible."""
        inner = quotient(self.size(factor), outer)
        if inner is None or factor in self._kept:
            return False
        self._factors[factor] = (self._new(outer), self._new(inner))
        self._resolved.clear()
        return True

    def _new(self, size: Size) -> AxisFactor:
        """Return a new factor, with `size` indices, in a class by itself."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def _root(self, factor: AxisFactor) -> AxisFactor:
        """Return the representative of a factor's class, and shorten the path to it."""
        parent = self._parent
        while parent[factor] != factor:
            parent[factor] = parent[parent[factor]]
            factor = parent[factor]
        return factor
