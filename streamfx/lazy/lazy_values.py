"""The dense values of deferred tensors: computed when read, shared by views.

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

from streamfx.lazy.recompute import RecomputeSource

aten = torch.ops.aten
_publishing = threading.RLock()  # held for a few assignments only: see NOTE [Cells that several threads read]

# Views that are also correct on a copy of the values with other strides.
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
    """A part of a tensor: index ranges of some dimensions. Dimensions in `single` are removed: one index is selected."""

    shape: tuple[int, ...]
    ranges: Mapping[int, range]
    single: frozenset[int] = frozenset()

    def of(self, dim: int) -> range:
        """Return the selected indices of a dimension."""
        return self.ranges.get(dim, range(self.shape[dim]))

    def narrow(self, position: int, index: int | slice) -> CellRows:
        """Return the part that `index` selects of this part; `position` counts the dimensions that are not removed."""
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
        return [item for item in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(item, Cell)]

    def run(self, get: Callable[[Cell], Tensor], result: int | None) -> Tensor:
        """Run the operator on the values that `get` returns for cells, and return the result with index `result`."""
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
        """Build a cell whose value comes from `source`, `step` or `value`, and register it as a reader of its operands."""
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
        """The operand of a view or a cast."""
        step = self.step
        return step.operands()[0] if step is not None else None

    @property
    def is_materialized(self) -> bool:
        """Whether the memory shared by all views exists."""
        return self.root.value is not None

    @property
    def numel(self) -> int:
        return self.like.numel()

    def read(self) -> Tensor:
        """Return the value, for reading only."""
        while True:
            step, was_materialized = self.step, self.is_materialized
            value = self.value
            if value is None:
                computed = self._compute_root(step) if self.root is self else self._compute_view(step)
                value = self._publish(computed, was_materialized)
            if value is not None:
                return value

    def _publish(self, computed: Tensor, was_materialized: bool) -> Tensor | None:
        """Set the value, unless another thread was first; return it. Return None if it must be recomputed in shared memory."""
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
        """Return the value in the memory that all views share."""
        self.root.read()
        return self.read()

    def writable(self) -> Tensor:
        """Return the shared memory for writing, after all registered readers have read the current values."""
        with _publishing:
            waiting = list(self.root._readers)
        for cell in waiting:
            cell.read()
        return self.aliased()

    def keep(self, value: Tensor) -> None:
        """Set the value to one that was computed in chunks, without reading the operands."""
        assert (value.dtype, value.shape) == (self.like.dtype, self.like.shape)
        self._publish(restride_like(value, self.like) if self.root is self else value, was_materialized=False)

    def cell_before_write(self) -> Cell | None:
        """Return a new cell for the value before a write, so that the write can be deferred as a function of the new cell.

        Return None if the write must run now: the value exists, this is a view, or another cell has yet to read it.
        """
        with _publishing:
            has_readers = len(self._readers) > 0
        if self.root is not self or self.value is not None or has_readers:
            return None
        return Cell(self.like, source=self.source, step=self.step, result=self.result)

    def write(self, step: DeferredOperator) -> None:
        """Replace the recipe of this cell by a step; views see its result, too."""
        with _publishing:
            self._drop_recipe()
            self.source, self.step, self.result = None, step, None
        self.depth = 1 + max(cell.depth for cell in step.operands())
        self._register_reads(step.operands())

    def has_rows(self) -> bool:
        """Return whether this is a view of rows that can be computed without the rest."""
        return self.rows is not None and not self.is_materialized and self.root._can_compute_rows(self.rows)

    def _compute_root(self, operator: DeferredOperator | None) -> Tensor:
        return restride_like(self._run_step(operator) if self.source is None else self.source.recompute(), self.like)

    def _drop_recipe(self) -> None:
        """Drop the step and the copies of parts, because the value has changed or has its own memory now."""
        if self.step is not None:
            for cell in self.step.operands():
                cell.root._readers.discard(self)
            self.step = None
        for cell in list(self._copies):
            cell.value = None
        self._copies.clear()

    def _compute_view(self, operator: DeferredOperator | None) -> Tensor:
        """Return a view's value: computed separately if it selects few rows, else by running the view on its operand."""
        return self.root._compute_rows(self.rows) if self.rows is not None and self.has_rows() else self._run_step(operator)

    def _run_step(self, operator: DeferredOperator | None) -> Tensor:
        """Run the operator on its operands: on copies if that is correct, else on the memory that views share."""
        assert operator is not None
        on_copies = self.root is self or operator.func in ON_COPIES
        return operator.run(Cell.read if on_copies else Cell.aliased, self.result)

    def _can_compute_rows(self, rows: CellRows) -> bool:
        """Return whether rows of this root should be computed separately: if possible, and if copies stay below half of it."""
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
        """Compute rows of this root without the rest; remove the dimensions in `single`."""
        self._num_copied += rows.numel()
        value = self._compute_ranges(rows.ranges)
        for dim in sorted(rows.single, reverse=True):
            value = value.select(dim, 0)
        return value

    def _compute_ranges(self, ranges: Mapping[int, range]) -> Tensor:
        """Return this value restricted to index ranges, computed from the source, the value or the operand of a cast."""
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
