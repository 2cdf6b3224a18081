"""The dense values behind deferred tensors: made when read, shared by views.

# NOTE [Memory shared by views]
A view of a deferred tensor is taken of the dense memory once that exists, so a write into one is seen in the other.
Only as long as the whole tensor has not been made may a view hold rows of its own, computed without the rest. Such a
copy is only ever read, by operators; the moment the whole tensor is made, which every write asks for, it is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from streamfx.runtime.rebuild import Source


@dataclass(frozen=True)
class Rows:
    """Part of a tensor: ranges of some of its dimensions, of which those in `single` are indexed away."""

    shape: tuple[int, ...]
    ranges: Mapping[int, range]
    single: frozenset[int] = frozenset()

    def of(self, dim: int) -> range:
        return self.ranges.get(dim, range(self.shape[dim]))

    def narrowed(self, position: int, index: int | slice) -> Rows:
        """The part of this part that `index` takes along a dimension of it."""
        dim = [dim for dim in range(len(self.shape)) if dim not in self.single][position]
        if isinstance(index, slice):
            wanted = self.of(dim)[index]
            full = wanted == range(self.shape[dim])
            return self if full else Rows(self.shape, {**self.ranges, dim: wanted}, self.single)
        row = self.of(dim)[index]
        return Rows(self.shape, {**self.ranges, dim: range(row, row + 1)}, self.single | {dim})

    def numel(self) -> int:
        return prod(len(self.of(dim)) for dim in range(len(self.shape)))


class Cell:
    """One dense value. `like` has its metadata, and may be a meta tensor.

    It is made from a `source`, or by a `step` from the value of its `base`. Where the step is a view, both have the
    same `root` and share memory; `rows` tells if the view is no more than some rows of the root.
    """

    def __init__(
        self,
        like: Tensor,
        source: Source | None = None,
        base: Cell | None = None,
        step: Callable[[Tensor], Tensor] | None = None,
        value: Tensor | None = None,
        rows: Rows | None = None,
        is_view: bool = False,
    ) -> None:
        self.like, self.source, self.base, self.step, self.value, self.rows = like, source, base, step, value, rows
        self._root: Cell | None = base.root if base is not None and is_view else None
        self._copies: weakref.WeakSet[Cell] = weakref.WeakSet()  # of a root: views that hold rows of their own
        self._waiting: weakref.WeakSet[Cell] = weakref.WeakSet()  # of a root: casts of its values, not yet made
        self._copied = 0  # of a root: elements computed for copies
        if base is not None and not is_view:
            base.root._waiting.add(self)

    @property
    def root(self) -> Cell:
        """The cell that owns the memory (not a reference to itself, which would keep it for the garbage collector)."""
        return self if self._root is None else self._root

    @property
    def is_whole(self) -> bool:
        """Whether the memory that all views share exists."""
        return self.root.value is not None

    def read(self) -> Tensor:
        """The value, to be read only."""
        if self.value is None:
            self.value = self._whole() if self.root is self else self._part()
        return self.value

    def aliased(self) -> Tensor:
        """The value in the memory that all views share."""
        self.root.read()
        return self.read()

    def writable(self) -> Tensor:
        """The same, once nothing else waits for the values that are in it now."""
        for cell in list(self.root._waiting):
            cell.read()
        return self.aliased()

    def _whole(self) -> Tensor:
        value = self._stepped() if self.source is None else _laid_out(self.source.rebuild(), self.like)
        if self.base is not None:
            self.base.root._waiting.discard(self)
            self.base = None  # a cast has its own memory
        for cell in self._copies:
            cell.value = None
        self._copies.clear()
        return value

    def _part(self) -> Tensor:
        root = self.root
        if not self.is_whole and self.rows is not None and root._makes(self.rows):
            value = root._rows(self.rows)
        else:
            value = self._stepped()
        if not self.is_whole:
            root._copies.add(self)
        return value

    def _stepped(self) -> Tensor:
        assert self.base is not None
        assert self.step is not None
        return self.step(self.base.read())

    def _makes(self, rows: Rows) -> bool:
        """Whether rows of this root are made without the rest: they can be, and add up to half of it at most."""
        source, cell = self.source, self
        while source is None and cell.base is not None and cell.base.root is cell.base and not cell.base.is_whole:
            cell = cell.base
            source = cell.source
        if source is None or not rows.ranges or not all(source.has_rows(dim) for dim in rows.ranges):
            return False
        return 2 * (self._copied + rows.numel()) <= prod(rows.shape)

    def _rows(self, rows: Rows) -> Tensor:
        self._copied += rows.numel()
        value = self._ranges(rows.ranges)
        for dim in sorted(rows.single, reverse=True):
            value = value.select(dim, 0)
        return value

    def _ranges(self, ranges: Mapping[int, range]) -> Tensor:
        if self.source is not None:
            return self.source.rebuild_rows(ranges)
        assert self.base is not None
        assert self.step is not None
        return self.step(self.base._ranges(ranges))


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """The value with the strides it was announced with; a kernel may choose others than its fake counterpart."""
    if all(a == b for a, b, size in zip(value.stride(), like.stride(), like.shape, strict=True) if size > 1):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
