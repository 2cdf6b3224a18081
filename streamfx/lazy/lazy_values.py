"""The dense values of deferred tensors: computed when read, shared by views.

A *cell* holds one value, or how to compute it: a *source* (a recorded program, and the tensors that it reads), or a *step* (an
operator on other cells). The *root* of a view is the cell that owns the memory; a cell that is no view is its own root. A value
is *materialized* if the memory of its root exists.

# NOTE [Memory shared by views]
If the dense memory of a deferred tensor exists, its views are views of that memory, so a write to one is visible in the other.
Before that, a view may hold a copy of its values, computed without the rest. Only operators read such a copy. It is dropped
when the full tensor is computed, and every write computes the full tensor first.

# NOTE [Cells that several threads read]
Several threads may read a dense tensor at once, and so they may read a cell. No lock is held while values are computed: the
first thread to finish publishes its value, and the others use it, because views must share one memory. A cell drops its step
only after its value is set. So a reader that may use either must read the step first.
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

from streamfx.ir.operator_table import MOVES_ELEMENTS, Kind, of_kind
from streamfx.lazy.recompute import RecomputeSource

aten = torch.ops.aten
_publishing = threading.RLock()  # held for a few assignments only: see NOTE [Cells that several threads read]

# Operators that, as views, are also correct on a copy of the operand with other strides; copies have memory of their own.
ON_COPIES = MOVES_ELEMENTS - of_kind(Kind.RESHAPE) | of_kind(Kind.SLICE, Kind.SELECT)


@dataclass(frozen=True)
class CellRows:
    """A part of a tensor of this `shape`: index ranges of some dimensions (the others are complete).

    Dimensions in `single` have one index, and are removed. x[2:4, 5] is shape x.shape, ranges {0: 2..4, 1: 5..6}, single {1}.
    """

    shape: tuple[int, ...]
    ranges: Mapping[int, range]
    single: frozenset[int] = frozenset()

    def of(self, dim: int) -> range:
        """Return the selected indices of a dimension of the full tensor."""
        return self.ranges.get(dim, range(self.shape[dim]))

    def narrow(self, position: int, index: int | slice) -> CellRows:
        """Return the part that `index`, an integer or a slice, selects of this part along one dimension.

        `position` is that dimension of the part, which lacks the dimensions in `single`: in x[5], position 0 is dimension 1 of x.
        """
        dim = [dim for dim in range(len(self.shape)) if dim not in self.single][position]
        if isinstance(index, slice):
            selected = self.of(dim)[index]
            full = selected == range(self.shape[dim])
            return self if full else CellRows(self.shape, {**self.ranges, dim: selected}, self.single)
        row = self.of(dim)[index]
        return CellRows(self.shape, {**self.ranges, dim: range(row, row + 1)}, self.single | {dim})

    def numel(self) -> int:
        """Return the number of selected elements."""
        return prod(len(self.of(dim)) for dim in range(len(self.shape)))


@dataclass(frozen=True, eq=False)
class DeferredOperator:
    """An operator that runs later; its arguments contain cells in place of deferred tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def operands(self) -> list[Cell]:
        """Return the cells among the arguments, in order."""
        return [item for item in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(item, Cell)]

    def run(self, get: Callable[[Cell], Tensor], result: int | None) -> Tensor:
        """Run the operator on the values that `get` returns for its cells.

        Return its result with index `result`, or its only result if `result` is None.
        """
        args, kwargs = pytree.tree_map_only(Cell, get, (self.args, dict(self.kwargs)))
        output = self.func(*args, **kwargs)
        tensor: Tensor = output if result is None else output[result]
        return tensor


class Cell:
    """A dense value that is computed when it is read. `like` has its metadata, and may be a meta tensor.

    The value is recomputed from a `source`, or is a `result` of a `step` on the values of other cells. If the step is a view, the
    cell and its operand have the same `root` and share memory; `rows` is set if the view selects index ranges of the root.
    Functions of a cell that `spreads` stay deferred, even if the cell's value exists.
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
        """Build a cell whose value comes from `source`, `step` (its result with index `result`) or `value`.

        It is registered as a reader of its operands, so that they are not written to before it has read them.
        """
        self.like, self.source, self.step, self.result, self.value, self.rows = like, source, step, result, value, rows
        self.spreads = spreads
        operands = step.operands() if step is not None else []
        self.depth: int = 1 + max((cell.depth for cell in operands), default=0)
        self._root: Cell | None = operands[0].root if is_view else None
        self._copies: weakref.WeakSet[Cell] = weakref.WeakSet()  # of a root: views that hold copies of their values
        self._readers: weakref.WeakSet[Cell] = weakref.WeakSet()  # of a root: cells that have yet to read its values
        self._num_copied = 0  # of a root: number of elements computed for copies
        if not is_view:
            self._register_reads(operands)

    @property
    def root(self) -> Cell:
        """The cell that owns the memory. A root holds no reference to itself, so no garbage collection is needed to free it."""
        return self if self._root is None else self._root

    @property
    def base(self) -> Cell | None:
        """The operand cell of a view or a cast, the first one of any other step; None if the value comes from no step."""
        step = self.step
        return step.operands()[0] if step is not None else None

    @property
    def is_materialized(self) -> bool:
        """Whether the memory that this value shares with the other views of its root exists."""
        return self.root.value is not None

    @property
    def numel(self) -> int:
        """The number of elements of the value."""
        return self.like.numel()

    def read(self) -> Tensor:
        """Return the value, for reading only; compute it if necessary.

        If another thread publishes a value, or memory of the root, at the same time, that is used instead (the loop).
        """
        while True:
            step, was_materialized = self.step, self.is_materialized
            value = self.value
            if value is None:
                computed = self._compute_root(step) if self.root is self else self._compute_view(step)
                value = self._publish(computed, was_materialized)
            if value is not None:
                return value

    def _publish(self, computed: Tensor, was_materialized: bool) -> Tensor | None:
        """Set the computed value, unless another thread has set one; return the value that is set.

        Return None if the root was materialized by another thread in the meantime (`was_materialized` is its state before): a
        view must then be computed again, as a view of that memory.
        """
        with _publishing:
            if self.value is None and self.is_materialized == was_materialized:
                self.value = computed
                if self.root is self:
                    self._drop_recipe()
                elif not was_materialized:
                    self.root._copies.add(self)
            return self.value

    def _register_reads(self, operands: Sequence[Cell]) -> None:
        """Register this cell as a reader of its operands, so that their memory is not written before this cell has read it."""
        with _publishing:
            for cell in operands:
                cell.root._readers.add(self)

    def aliased(self) -> Tensor:
        """Return the value in the memory that all views of its root share, which is computed if necessary."""
        self.root.read()
        return self.read()

    def writable(self) -> Tensor:
        """Return the value in shared memory, for writing. First, cells that have yet to read the current values read them."""
        with _publishing:
            waiting = list(self.root._readers)
        for cell in waiting:
            cell.read()
        return self.aliased()

    def keep(self, value: Tensor) -> None:
        """Set the value to one that was computed otherwise (in chunks of the sequence), unless it is set."""
        assert (value.dtype, value.shape) == (self.like.dtype, self.like.shape)
        self._publish(restride_like(value, self.like) if self.root is self else value, was_materialized=False)

    def cell_before_write(self) -> Cell | None:
        """Return a new cell for the value before a write, so that the write can be deferred: x.div_(2) is new = div(old, 2).

        Return None if the write must run now: the value exists, this is a view, or another cell has yet to read it.
        """
        with _publishing:
            has_readers = len(self._readers) > 0
        if self.root is not self or self.value is not None or has_readers:
            return None
        return Cell(self.like, source=self.source, step=self.step, result=self.result)

    def write(self, step: DeferredOperator) -> None:
        """Change how this cell, a root without a value, is computed: by `step`, a deferred write. Its views see the result."""
        with _publishing:
            self._drop_recipe()
            self.source, self.step, self.result = None, step, None
        self.depth = 1 + max(cell.depth for cell in step.operands())
        self._register_reads(step.operands())

    def has_rows(self) -> bool:
        """Return whether this is a view of index ranges of its root that can, and should, be computed without the rest."""
        return self.rows is not None and not self.is_materialized and self.root._can_compute_rows(self.rows)

    def _compute_root(self, operator: DeferredOperator | None) -> Tensor:
        """Return the value of a root from its source, or else by running `operator`, its step, with the strides of `like`."""
        return restride_like(self._run_step(operator) if self.source is None else self.source.recompute(), self.like)

    def _drop_recipe(self) -> None:
        """Drop the step, because the value now exists or comes from another step, and the values of views that are copies."""
        if self.step is not None:
            for cell in self.step.operands():
                cell.root._readers.discard(self)
            self.step = None
        for cell in list(self._copies):
            cell.value = None
        self._copies.clear()

    def _compute_view(self, operator: DeferredOperator | None) -> Tensor:
        """Return a view's value: a copy of few rows, computed without the rest, or `operator` (the view) run on its operand."""
        return self.root._compute_rows(self.rows) if self.rows is not None and self.has_rows() else self._run_step(operator)

    def _run_step(self, operator: DeferredOperator | None) -> Tensor:
        """Run the operator on its operands: on copies if that is correct, else on the memory that views share."""
        assert operator is not None
        on_copies = self.root is self or operator.func in ON_COPIES
        return operator.run(Cell.read if on_copies else Cell.aliased, self.result)

    def _can_compute_rows(self, rows: CellRows) -> bool:
        """Return whether index ranges of this root should be computed without the rest.

        The root, or the operand of its casts, must have a source that can compute them, and all such copies together may have at
        most half of the root's elements.
        """
        cell = self
        while cell.source is None and cell._is_cast() and (base := cell.base) is not None:
            if base.root is not base or base.is_materialized:
                return False
            cell = base
        source = cell.source
        if source is None or not rows.ranges or not rows.numel() or not all(source.has_rows(dim) for dim in rows.ranges):
            return False
        return 2 * (self._num_copied + rows.numel()) <= prod(rows.shape)

    def _is_cast(self) -> bool:
        """Return whether the value is a copy of its operand with another dtype."""
        step = self.step
        return step is not None and step.func is aten._to_copy.default

    def _compute_rows(self, rows: CellRows) -> Tensor:
        """Compute index ranges of this root without the rest, and return them without the dimensions in `rows.single`."""
        self._num_copied += rows.numel()
        value = self._compute_ranges(rows.ranges)
        for dim in sorted(rows.single, reverse=True):
            value = value.select(dim, 0)
        return value

    def _compute_ranges(self, ranges: Mapping[int, range]) -> Tensor:
        """Return this value restricted to index ranges (dimension -> indices), without computing the rest.

        They are computed by the source, sliced from the value if it exists, or cast from the ranges of the operand.
        """
        if self.source is not None:
            return self.source.recompute_rows(ranges)
        step, value = self.step, self.value
        if step is None:
            assert value is not None
            selected = (ranges.get(dim, range(size)) for dim, size in enumerate(value.shape))
            return value[tuple(slice(rows.start, rows.stop, rows.step) for rows in selected)]
        return step.run(lambda cell: cell._compute_ranges(ranges), self.result)


def restride_like(value: Tensor, like: Tensor) -> Tensor:
    """Return the value with the strides of `like`, because a kernel may choose other strides than its fake implementation."""
    if all(a == b for a, b, size in zip(value.stride(), like.stride(), like.shape, strict=True) if size > 1):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
