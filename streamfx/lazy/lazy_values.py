"""The dense values behind deferred tensors: made when read, shared by views.

# NOTE [Memory shared by views]
A view of a deferred tensor is taken of the dense memory once that exists, so a write into one is seen in the other.
Only as long as the whole tensor has not been made may a view hold values of its own, computed without the rest. Such a
copy is only ever read, by operators; the moment the whole tensor is made, which every write asks for, it is dropped.

# NOTE [Cells that several threads read]
A dense tensor may be read by several threads at once, and so may a cell. Nothing is locked while values are made: whoever comes
with a value first has made it, and the others take that one (views have to share one memory). A cell that has its value forgets
its step, in this order; so who wants either reads the step first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.lazy.recompute import RecomputeSource

aten = torch.ops.aten
_settling = threading.RLock()  # held for a few assignments at a time: see NOTE [Cells that several threads read]

# Views that are also right on a copy of the values, whose strides may be others.
ON_COPIES = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)


@dataclass(frozen=True)
class CellRows:
    """Part of a tensor: ranges of some of its dimensions, of which those in `single` are indexed away."""

    shape: tuple[int, ...]
    ranges: Mapping[int, range]
    single: frozenset[int] = frozenset()

    def of(self, dim: int) -> range:
        return self.ranges.get(dim, range(self.shape[dim]))

    def narrowed(self, position: int, index: int | slice) -> CellRows:
        """The part of this part that `index` takes along a dimension of it."""
        dim = [dim for dim in range(len(self.shape)) if dim not in self.single][position]
        if isinstance(index, slice):
            wanted = self.of(dim)[index]
            full = wanted == range(self.shape[dim])
            return self if full else CellRows(self.shape, {**self.ranges, dim: wanted}, self.single)
        row = self.of(dim)[index]
        return CellRows(self.shape, {**self.ranges, dim: range(row, row + 1)}, self.single | {dim})

    def numel(self) -> int:
        return prod(len(self.of(dim)) for dim in range(len(self.shape)))


@dataclass(frozen=True, eq=False)
class DeferredOperator:
    """An operator to be run later; cells stand in its arguments for deferred tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def operands(self) -> list[Cell]:
        return [item for item in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(item, Cell)]

    def run(self, get: Callable[[Cell], Tensor], result: int | None) -> Tensor:
        """One of its results, from the values that `get` gives for cells."""
        args, kwargs = pytree.tree_map_only(Cell, get, (self.args, dict(self.kwargs)))
        made = self.func(*args, **kwargs)
        part: Tensor = made if result is None else made[result]
        return part


class Cell:
    """One dense value. `like` has its metadata, and may be a meta tensor.

    It is made from a `source`, or is a `result` of a `step` on the values of other cells. Where the step is a view, the cell and
    its operand have the same `root` and share memory; `rows` tells if the view is no more than some rows of the root. What is
    made of a cell that `spreads` stays deferred, even where the cell's own value is there.
    """

    def __init__(
        self,
        like: Tensor,
        source: RecomputeSource | None = None,
        step: DeferredOperator | None = None,
        result: int | None = None,
        value: Tensor | None = None,
        rows: CellRows | None = None,
        is_view: bool = False,
        spreads: bool = False,
    ) -> None:
        self.like, self.source, self.step, self.result, self.value, self.rows = like, source, step, result, value, rows
        self.spreads = spreads
        operands = step.operands() if step is not None else []
        self.depth: int = 1 + max((cell.depth for cell in operands), default=0)
        self._root: Cell | None = operands[0].root if is_view else None
        self._copies: weakref.WeakSet[Cell] = weakref.WeakSet()  # of a root: views that hold values of their own
        self._waiting: weakref.WeakSet[Cell] = weakref.WeakSet()  # of a root: what is to be made of its values
        self._copied = 0  # of a root: elements computed for copies
        if not is_view:
            self._wait_for(operands)

    @property
    def root(self) -> Cell:
        """The cell that owns the memory (not a reference to itself, which would keep it for the garbage collector)."""
        return self if self._root is None else self._root

    @property
    def base(self) -> Cell | None:
        """What a view or a cast is taken of."""
        step = self.step
        return step.operands()[0] if step is not None else None

    @property
    def is_whole(self) -> bool:
        """Whether the memory that all views share exists."""
        return self.root.value is not None

    @property
    def numel(self) -> int:
        return self.like.numel()

    def read(self) -> Tensor:
        """The value, to be read only."""
        while True:
            step, was_whole = self.step, self.is_whole
            value = self.value
            if value is None:
                made = self._whole(step) if self.root is self else self._part(step)
                value = self._settled(made, was_whole)
            if value is not None:
                return value

    def _settled(self, made: Tensor, was_whole: bool) -> Tensor | None:
        """The cell's value: what was made of it, if no other thread was first; None where it has to be made again."""
        with _settling:
            if self.value is None and self.is_whole == was_whole:
                self.value = made
                if self.root is self:
                    self._forget()
                elif not was_whole:
                    self.root._copies.add(self)
            return self.value

    def _wait_for(self, operands: Sequence[Cell]) -> None:
        """Let nobody write to the memory of operands before they are read for this cell."""
        with _settling:
            for cell in operands:
                cell.root._waiting.add(self)

    def aliased(self) -> Tensor:
        """The value in the memory that all views share."""
        self.root.read()
        return self.read()

    def writable(self) -> Tensor:
        """The same, once nothing else waits for the values that are in it now."""
        with _settling:
            waiting = list(self.root._waiting)
        for cell in waiting:
            cell.read()
        return self.aliased()

    def keep(self, value: Tensor) -> None:
        """Take a value that was made without that of any operand."""
        assert (value.dtype, value.shape) == (self.like.dtype, self.like.shape)
        self._settled(laid_out(value, self.like) if self.root is self else value, was_whole=False)

    def before_a_write(self) -> Cell | None:
        """A new cell with the recipe of this one, so that what is written can wait, as a function of it.

        None where the write has to be done at once: the value is there, this is a view, or another cell will still read it.
        """
        with _settling:
            is_asked_for = len(self._waiting) > 0
        if self.root is not self or self.value is not None or is_asked_for:
            return None
        return Cell(self.like, source=self.source, step=self.step, result=self.result)

    def write(self, step: DeferredOperator) -> None:
        """Hold the result of a step from now on; views see it, too."""
        with _settling:
            self._forget()
            self.source, self.step, self.result = None, step, None
        self.depth = 1 + max(cell.depth for cell in step.operands())
        self._wait_for(step.operands())

    def has_rows(self) -> bool:
        """Whether this is a view of rows that are made without the rest."""
        return self.rows is not None and not self.is_whole and self.root._makes(self.rows)

    def _whole(self, step: DeferredOperator | None) -> Tensor:
        return laid_out(self._stepped(step) if self.source is None else self.source.rebuild(), self.like)

    def _forget(self) -> None:
        """The value is another, or has memory of its own now: forget where it came from, and the copies of its parts."""
        if self.step is not None:
            for cell in self.step.operands():
                cell.root._waiting.discard(self)
            self.step = None
        for cell in list(self._copies):
            cell.value = None
        self._copies.clear()

    def _part(self, step: DeferredOperator | None) -> Tensor:
        return self.root._rows(self.rows) if self.rows is not None and self.has_rows() else self._stepped(step)

    def _stepped(self, step: DeferredOperator | None) -> Tensor:
        assert step is not None
        on_copies = self.root is self or step.func in ON_COPIES
        return step.run(Cell.read if on_copies else Cell.aliased, self.result)

    def _makes(self, rows: CellRows) -> bool:
        """Whether rows of this root are made without the rest: they can be, and add up to half of it at most."""
        cell = self
        while cell.source is None and cell._is_cast() and (base := cell.base) is not None:
            if base.root is not base or base.is_whole:
                return False
            cell = base
        source = cell.source
        if source is None or not rows.ranges or not rows.numel() or not all(source.has_rows(dim) for dim in rows.ranges):
            return False
        return 2 * (self._copied + rows.numel()) <= prod(rows.shape)

    def _is_cast(self) -> bool:
        step = self.step
        return step is not None and step.func is aten._to_copy.default

    def _rows(self, rows: CellRows) -> Tensor:
        self._copied += rows.numel()
        value = self._ranges(rows.ranges)
        for dim in sorted(rows.single, reverse=True):
            value = value.select(dim, 0)
        return value

    def _ranges(self, ranges: Mapping[int, range]) -> Tensor:
        if self.source is not None:
            return self.source.rebuild_rows(ranges)
        step, value = self.step, self.value
        if step is None:
            assert value is not None
            wanted = (ranges.get(dim, range(size)) for dim, size in enumerate(value.shape))
            return value[tuple(slice(rows.start, rows.stop, rows.step) for rows in wanted)]
        return step.run(lambda cell: cell._ranges(ranges), self.result)


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """The value with the strides it was announced with; a kernel may choose others than its fake counterpart."""
    if all(a == b for a, b, size in zip(value.stride(), like.stride(), like.shape, strict=True) if size > 1):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
