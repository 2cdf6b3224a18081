"""Axes: the index space of each dimension.

A dimension is a row-major product of axis factors (atoms), as in einops' `(b t)`; a dimension of size one has none. Two
dimensions with the same atoms share an index space. Only operators establish this; equal sizes never do.

A *kept* atom, such as the sequence, is indivisible. A view that splits it into *blocks* of rows, `[t] -> [c l]` (outer: c
blocks; inner: l rows per block), gets two new atoms, which are recorded but are no factors of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from streamfx.ir.sizes import Size, product, quotient

Atom: TypeAlias = int
Dim: TypeAlias = "tuple[Atom, ...]"


class AxisTable:
    """Union-find over atoms: unified atoms are one class, with a representative.

    An atom can be refined into a product of smaller atoms, unless `keep` has marked it.
    """

    def __init__(self) -> None:
        """Start without atoms. An atom is an index into `_parent` and `_size`."""
        self._kept: set[Atom] = set()  # indivisible atoms
        self._blocks: list[tuple[Atom, Dim]] = []  # kept atoms, and the axes (outer, inner) into which a view splits them
        self._parent: list[Atom] = []  # the union-find tree: another atom of the same class, or the atom itself
        self._size: list[Size] = []
        self._factors: dict[Atom, Dim] = {}  # the smaller atoms, (outer, inner), whose product a refined atom is
        self._resolved: dict[Dim, Dim] = {}  # cache of `resolve`, valid until two axes are unified, or one is split
        self._sizes: dict[Dim, Size] = {}  # always valid: only axes of equal size are unified

    def fresh(self, size: Size) -> Dim:
        """Return a new dimension that is not related to any other; it has no atom if its size is one."""
        return () if size == 1 else (self._new(size),)

    def keep(self, atom: Atom) -> None:
        """Mark an atom as indivisible: nothing refines it."""
        self._kept.add(self._root(atom))

    def is_kept(self, atom: Atom) -> bool:
        """Return whether an atom is marked as indivisible."""
        return self._root(atom) in self._kept

    def size(self, atom: Atom) -> Size:
        """Return the number of indices of an atom."""
        return self._size[self._root(atom)]

    def size_of_dim(self, dim: Dim) -> Size:
        """Return the size of a dimension: the product of the sizes of its atoms."""
        size = self._sizes.get(dim)
        if size is None:
            size = self._sizes[dim] = product(self.size(atom) for atom in dim)
        return size

    def resolve(self, dim: Sequence[Atom]) -> Dim:
        """Return the dimension in the finest known atoms, each as the representative of its class."""
        key = tuple(dim)
        atoms = self._resolved.get(key)
        if atoms is None:
            atoms = self._resolved[key] = tuple(self._finest(key))
        return atoms

    def _finest(self, dim: Dim) -> Iterator[Atom]:
        """Yield the finest known atoms of a dimension: the factors of each refined atom, in row-major order."""
        for atom in dim:
            root = self._root(atom)
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
            left_atom, right_atom = self._next(todo_left), self._next(todo_right)
            if left_atom == right_atom:
                continue
            if self.size(left_atom) == self.size(right_atom):
                self._parent[left_atom] = right_atom
                self._resolved.clear()
                self._kept |= {right_atom} if left_atom in self._kept else set()
                continue
            if self._refine(left_atom, self.size(right_atom)):
                todo_left.extend(reversed(self._factors[left_atom]))
                todo_right.append(right_atom)
            elif self._refine(right_atom, self.size(left_atom)):
                todo_right.extend(reversed(self._factors[right_atom]))
                todo_left.append(left_atom)
            else:
                return False
        return not todo_left and not todo_right

    def regroup(self, atoms: Dim, shape: Sequence[Size]) -> tuple[Dim, ...] | None:
        """Return dimensions of sizes `shape` over the same row-major elements as `atoms`, as for a view.

        `(b t)` with b=2, t=12 and shape (2, 3, 4) -> `[b t1 t2]`: t is refined into factors, or split into blocks if it is
        kept. None if the sizes are no products of atoms and their factors.
        """
        todo = list(reversed(self.resolve(atoms)))  # outermost last
        dims: list[Dim] = []
        for size in shape:
            dim: list[Atom] = []
            remaining = size
            while remaining != 1:
                if not todo:
                    return None
                atom = self._next(todo)
                quotient_size = quotient(remaining, self.size(atom))
                if quotient_size is not None:
                    dim.append(atom)
                    remaining = quotient_size
                elif self._refine(atom, remaining):
                    todo.extend(reversed(self._factors[atom]))
                elif blocks := self._split_kept(atom, remaining):
                    todo.extend(reversed(blocks))
                else:
                    return None
            dims.append(self._merge_blocks(dim))
        return None if todo else tuple(dims)

    def are_blocks(self, atom: Atom, blocks: Dim) -> bool:
        """Return whether a view has split a kept atom into these axes, `blocks` = (outer, inner)."""
        return any(
            self._root(kept) == self._root(atom) and self.resolve(block_axes) == self.resolve(blocks)
            for kept, block_axes in self._blocks
        )

    def block_splits(self) -> list[tuple[Atom, Dim, Dim]]:
        """Return (kept atom, axis of blocks, axis of rows within a block) for each split of a kept atom by a view."""
        return [(self._root(kept), *(self.resolve((a,)) for a in axes)) for kept, axes in self._blocks]  # type: ignore[misc]

    def _split_kept(self, atom: Atom, outer: Size) -> Dim | None:
        """Split a kept atom into `outer` blocks; return (axis of blocks, axis within a block), the same at each call.

        None if the atom is not kept, or if its size is not a multiple of `outer`.
        """
        inner = quotient(self.size(atom), outer)
        if inner is None or atom not in self._kept:
            return None
        for kept, blocks in self._blocks:
            if self._root(kept) == atom and self.size(blocks[0]) == outer:
                return blocks
        self._blocks.append((atom, (self._new(outer), self._new(inner))))
        return self._blocks[-1][1]

    def _merge_blocks(self, dim: list[Atom]) -> Dim:
        """Replace adjacent block axes in a dimension with the kept atom that was split into them: `(c l) -> t`.

        The inner axis may be another axis of the same size, because only the index of a row in its block matters; then
        this pair of axes is recorded as blocks of the atom, too.
        """
        for kept_atom, (outer_axis, inner_axis) in list(self._blocks):
            outer, both_axes = self.resolve((outer_axis,)), self.resolve((outer_axis, inner_axis))
            for i in range(len(dim)):
                after_outer = dim[i + len(outer) :]
                if self.resolve(dim[i : i + len(both_axes)]) == both_axes:
                    dim = [*dim[:i], self._root(kept_atom), *dim[i + len(both_axes) :]]
                elif (
                    after_outer
                    and self.resolve(dim[i : i + len(outer)]) == outer
                    and self.size(after_outer[0]) == self.size(inner_axis)
                ):
                    self._blocks.append((kept_atom, (outer_axis, after_outer[0])))
                    dim = [*dim[:i], self._root(kept_atom), *after_outer[1:]]
        return tuple(dim)

    def _next(self, todo: list[Atom]) -> Atom:
        """Pop an atom from a reversed list; resolve it again, because it may have been split or unified since."""
        todo.extend(reversed(self.resolve((todo.pop(),))))
        return todo.pop()

    def _refine(self, atom: Atom, outer: Size) -> bool:
        """Split an atom into two factors, the outer one of size `outer`; return False if it is kept, or not divisible."""
        inner = quotient(self.size(atom), outer)
        if inner is None or atom in self._kept:
            return False
        self._factors[atom] = (self._new(outer), self._new(inner))
        self._resolved.clear()
        return True

    def _new(self, size: Size) -> Atom:
        """Return a new atom, with `size` indices, in a class by itself."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def _root(self, atom: Atom) -> Atom:
        """Return the representative of an atom's class, and shorten the path to it."""
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom
