"""Operators with data-dependent numbers of rows. On fake tensors, their results have the largest possible number of rows.

nonzero(mask [b t])   ->   [b * t, 2]
x[mask]               ->   x[rows, columns], for b * t rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streamfx.cost.nested_tensors import tensors_in
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.torch_private import FakeTensor

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)


def _nonzero(mask: Tensor) -> Tensor:
    """Return the indices of all positions of a mask, as if each were set."""
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _selected(value: Tensor, mask: Tensor) -> Tensor:
    """Return a 1-d result with all elements, as if the mask selected each."""
    return value.new_empty(torch.broadcast_shapes(value.shape, mask.shape).numel())


def _unique(value: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, inverse indices, counts) as if all elements were distinct."""
    count = value.numel()
    return value.new_empty(count), torch.empty_like(value, dtype=torch.int64), value.new_empty(count, dtype=torch.int64)


def _as_indices(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace masks with indices of all positions that they may select."""
    expanded: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in MASKS
        expanded += [_nonzero(index)[:, 0]] * index.dim() if is_mask else [index]  # type: ignore[arg-type,union-attr]
    return expanded


def _indexing(func: Any) -> Callable[..., Any]:
    """Return an indexing operator that replaces its masks with indices before it runs `func`."""
    return lambda value, indices, *others, **more: func(value, _as_indices(indices), *others, **more)


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _selected,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    **{func: _indexing(func) for func in of_kind(Kind.LOOKUP, Kind.PUT) | {aten.index_put_.default}},
}


def run_with_max_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator. If its operands are fake and have no values, return results with the largest number of rows."""
    stand_in = STAND_INS.get(func)
    is_fake = stand_in is not None and any(isinstance(item, FakeTensor) for item in tensors_in((args, kwargs)))
    return stand_in(*args, **kwargs) if is_fake and stand_in is not None else func(*args, **kwargs)
