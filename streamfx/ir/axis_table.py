"""Axes: what a dimension ranges over.

A dimension is a row-major product of atoms, as in einops' `(b t)`; a dimension of size one has none. Two dimensions
that hold the same atoms index the same thing, and only operators can say so: sizes never do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from streamfx.ir.sizes import Size, product, quotient

Atom: TypeAlias = int
Dim: TypeAlias = "tuple[Atom, ...]"


class AxisTable:
    """Union-find over atoms, each of which may also be refined into a product of finer ones, except for those that are kept."""

    def __init__(self) -> None:
        self._kept: set[Atom] = set()
        self._blocks: list[tuple[Atom, Dim]] = []  # kept atoms, and the axes into which a view cuts them
        self._parent: list[Atom] = []
        self._size: list[Size] = []
        self._parts: dict[Atom, Dim] = {}
        self._resolved: dict[Dim, Dim] = {}  # until two axes are joined, or one is split
        self._sizes: dict[Dim, Size] = {}  # for good: only axes of one size are joined

    def fresh(self, size: Size) -> Dim:
        """A dimension that so far has nothing to do with any other."""
        return () if size == 1 else (self._new(size),)

    def keep(self, atom: Atom) -> None:
        """State that an atom stays in one piece, whatever cuts it."""
        self._kept.add(self._root(atom))

    def is_kept(self, atom: Atom) -> bool:
        return self._root(atom) in self._kept

    def size(self, atom: Atom) -> Size:
        return self._size[self._root(atom)]

    def size_of_dim(self, dim: Dim) -> Size:
        known = self._sizes.get(dim)
        if known is None:
            known = self._sizes[dim] = product(self.size(atom) for atom in dim)
        return known

    def resolve(self, dim: Sequence[Atom]) -> Dim:
        """The dimension in the finest atoms known, each the representative of its class."""
        own = tuple(dim)
        known = self._resolved.get(own)
        if known is None:
            known = self._resolved[own] = tuple(self._finest(own))
        return known

    def _finest(self, dim: Dim) -> Iterator[Atom]:
        for atom in dim:
            root = self._root(atom)
            parts = self._parts.get(root)
            yield from (root,) if parts is None else self.resolve(parts)

    def unify(self, left: Dim, right: Dim) -> bool:
        """State that both dimensions index the same thing; False when their factors cannot be matched.

        Factors are matched from the outermost. Each matched pair is a true statement even when a later one fails,
        because a row-major index determines its outer factors.
        """
        todo_left, todo_right = list(reversed(self.resolve(left))), list(reversed(self.resolve(right)))
        while todo_left and todo_right:
            a, b = self._next(todo_left), self._next(todo_right)
            if a == b:
                continue
            if self.size(a) == self.size(b):
                self._parent[a] = b
                self._resolved.clear()
                self._kept |= {b} if a in self._kept else set()
                continue
            if self._refine(a, self.size(b)):
                todo_left.extend(reversed(self._parts[a]))
                todo_right.append(b)
            elif self._refine(b, self.size(a)):
                todo_right.extend(reversed(self._parts[b]))
                todo_left.append(a)
            else:
                return False
        return not todo_left and not todo_right

    def regroup(self, atoms: Dim, shape: Sequence[Size]) -> tuple[Dim, ...] | None:
        """The dimensions of `shape` over the same row-major elements as `atoms`; None where they do not nest."""
        todo, dims = list(reversed(self.resolve(atoms))), []
        for size in shape:
            dim: list[Atom] = []
            left = size
            while left != 1:
                if not todo:
                    return None
                atom = self._next(todo)
                rest = quotient(left, self.size(atom))
                if rest is not None:
                    dim.append(atom)
                    left = rest
                elif self._refine(atom, left):
                    todo.extend(reversed(self._parts[atom]))
                elif blocks := self._cut(atom, left):
                    todo.extend(reversed(blocks))
                else:
                    return None
            dims.append(self._joined(dim))
        return None if todo else tuple(dims)

    def are_blocks(self, atom: Atom, blocks: Dim) -> bool:
        """Whether a view has cut a kept atom into these axes: (outer, inner), neither of which is any part of it."""
        return any(self._root(own) == self._root(atom) and self.resolve(cut) == self.resolve(blocks) for own, cut in self._blocks)

    def cuts(self) -> list[tuple[Atom, Dim, Dim]]:
        """Kept atoms that views have cut, with the axis of the blocks and the axis inside of a block."""
        return [(self._root(own), *(self.resolve((part,)) for part in blocks)) for own, blocks in self._blocks]  # type: ignore[misc]

    def _cut(self, atom: Atom, outer: Size) -> Dim | None:
        """Axes for a kept atom in blocks; the same ones each time."""
        inner = quotient(self.size(atom), outer)
        if inner is None or atom not in self._kept:
            return None
        for own, blocks in self._blocks:
            if self._root(own) == atom and self.size(blocks[0]) == outer:
                return blocks
        self._blocks.append((atom, (self._new(outer), self._new(inner))))
        return self._blocks[-1][1]

    def _joined(self, dim: list[Atom]) -> Dim:
        """A dimension in which blocks that stand side by side again are the atom that was cut into them.

        What is inside of the blocks may be another axis of their size: a row's number in its block is all that counts.
        """
        for atom, blocks in list(self._blocks):
            outer, cut, size = self.resolve(blocks[:1]), self.resolve(blocks), self.size(blocks[1])
            for i in range(len(dim)):
                rest = dim[i + len(outer) :]
                if self.resolve(dim[i : i + len(cut)]) == cut:
                    dim = [*dim[:i], self._root(atom), *dim[i + len(cut) :]]
                elif rest and self.resolve(dim[i : i + len(outer)]) == outer and self.size(rest[0]) == size:
                    self._blocks.append((atom, (blocks[0], rest[0])))
                    dim = [*dim[:i], self._root(atom), *rest[1:]]
        return tuple(dim)

    def _next(self, todo: list[Atom]) -> Atom:
        """Take an atom off a reversed list; one that was split or matched since it was put there is resolved again."""
        todo.extend(reversed(self.resolve((todo.pop(),))))
        return todo.pop()

    def _refine(self, atom: Atom, outer: Size) -> bool:
        """Split an atom into `outer` times the rest, where that divides."""
        inner = quotient(self.size(atom), outer)
        if inner is None or atom in self._kept:
            return False
        self._parts[atom] = (self._new(outer), self._new(inner))
        self._resolved.clear()
        return True

    def _new(self, size: Size) -> Atom:
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def _root(self, atom: Atom) -> Atom:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom
