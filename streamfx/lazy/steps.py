"""Decide which operators on deferred tensors are deferred, and build the cells of their results.

Views and casts are always deferred. So is any pure function with a large operand or result. A loss on deferred logits, and
autograd's formulas for its gradient, thus become one expression. Only small results of the expression are read, and they are
computed in chunks of the sequence (see `streamed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.lazy.lazy_values import Cell, CellRows, DeferredOperator

aten = torch.ops.aten
MIN_NUMEL = 1 << 21  # elements of a large value, whose functions are deferred
MAX_DEPTH = 100  # depth of an expression, because traversals are recursive
SMALL_RATIO = 8  # a value is small if it has this many times fewer elements than the widest one; small operands are copied

IMPURE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_wide(cell: Cell) -> bool:
    """Return whether a value is large and not computed yet."""
    return cell.value is None and not cell.is_materialized and cell.numel >= MIN_NUMEL


def widest_below(cell: Cell) -> int:
    """Return the number of elements of the largest wide value that reading a cell would compute; 0 if there is none."""
    seen, pending, widest = {cell}, [cell], 0
    while pending:
        for operand in _operands_to_read(pending.pop()):
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
                widest = max(widest, operand.numel if is_wide(operand) else 0)
    return widest


def _operands_to_read(cell: Cell) -> list[Cell]:
    """Return the operands that a cell must read to compute its value."""
    step = cell.step  # before the value: see NOTE [Cells that several threads read]
    is_computed = cell.value is not None or (cell.root is not cell and (cell.is_materialized or cell.has_rows()))
    return [] if is_computed or step is None else step.operands()


def is_small_part(cell: Cell) -> bool:
    """Return whether a value is small relative to others that reading it would compute."""
    return 0 < SMALL_RATIO * cell.numel <= widest_below(cell)


def is_small_view(cell: Cell) -> bool:
    """Return whether a value is a small view of a large one that is not computed yet."""
    return cell.root is not cell and is_wide(cell.root) and SMALL_RATIO * cell.numel <= cell.root.numel


# -- views and casts


def view_cells(func: Any, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cell | list[Cell]:
    """Return deferred views of a deferred tensor (see NOTE [Memory shared by views]). `args` follow the tensor argument."""
    step = DeferredOperator(func, (cell, *args), kwargs)
    on_metadata = not cell.is_materialized and func is not aten.as_strided.default
    views = func(meta_of(cell.like) if on_metadata else cell.aliased(), *args, **kwargs)
    if not isinstance(views, Tensor):
        return [_view_cell(view, step, index) for index, view in enumerate(views)]
    return _view_cell(views, step, None, _selected_rows(func, cell, args))


def _view_cell(view: Tensor, step: DeferredOperator, result: int | None, rows: CellRows | None = None) -> Cell:
    """Return the cell of a view; `result` is its index if the operator returns several views."""
    value, spreads = None if view.is_meta else view, step.operands()[0].spreads
    return Cell(view, step=step, result=result, value=value, rows=rows, is_view=True, spreads=spreads)


def _selected_rows(func: Any, cell: Cell, args: Sequence[Any]) -> CellRows | None:
    """Return the rows of the root that a view selects; None if the view does more than that."""
    rows = cell.rows if cell.root is not cell else CellRows(tuple(cell.like.shape), {})
    if rows is None or func in (aten.alias.default, aten.detach.default):
        return rows
    if func is aten.select.int:
        return rows.narrow(args[0] % cell.like.dim(), args[1])
    if func is aten.slice.Tensor:
        dim, start, stop, step = tuple(args) + (0, None, None, 1)[len(args) :]
        return rows.narrow(dim % cell.like.dim(), slice(start, stop, step))
    return None


def is_lazy_cast(func: Any, cell: Cell, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether a copy changes only the dtype of a value that is not computed yet."""
    options = {name for name, value in kwargs.items() if value not in (None, False)}
    same_device = kwargs.get("device") in (None, device)
    is_cast = func is aten._to_copy.default and options <= {"dtype", "device", "layout", "memory_format"}
    return is_cast and same_device and cell.value is None


def cast(func: Any, cell: Cell, kwargs: Mapping[str, Any]) -> Cell:
    """Return the cell of a deferred change of dtype."""
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    return Cell(func(meta_of(cell.like), **kwargs), step=DeferredOperator(func, (cell,), kwargs))


# -- all other operators


def defer_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> list[Cell] | None:
    """Return cells of the results, if large deferred operands, or large results of operands that `spread`, make it worthwhile.

    Return None for any other operator. The arguments contain cells in place of deferred tensors.
    """
    operands = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, Cell)]
    widest = max((cell.numel for cell in operands if is_wide(cell)), default=0)
    if not (widest or any(cell.spreads for cell in operands)) or not _is_function(func, kwargs, device):
        return None
    if max(cell.depth for cell in operands) > MAX_DEPTH:
        return None
    try:
        metas = _result_metas(func, args, kwargs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):  # the operator itself raises this later
        return None
    if not metas or any(like is None for like in metas):  # a gradient that is not requested
        return None
    if (widest := max(widest, *(like.numel() for like in metas))) < MIN_NUMEL:
        return None
    small_copies = [
        _small_copy(item, widest // SMALL_RATIO) for item in pytree.tree_leaves((args, dict(kwargs))) if _is_dense(item)
    ]
    if any(item is None for item in small_copies):
        return None
    copies = iter(small_copies)
    step = DeferredOperator(func, *pytree.tree_map_only(_is_dense, lambda item: next(copies), (tuple(args), dict(kwargs))))
    has_several = len(func._schema.returns) > 1
    return [Cell(like, step=step, result=index if has_several else None) for index, like in enumerate(metas)]


def defer_write(func: Any, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Defer an in-place operator on a large value that is not computed yet, if no other cell has yet to read the old value.

    `args` follow the written value, with cells in place of deferred tensors. Return whether the operator was deferred.
    """
    function = _function_of(func)
    others = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, Cell) and item is not cell]
    if function is None or not is_wide(cell) or any(other.root is cell for other in others):
        return False
    previous = cell.cell_before_write()
    if previous is None:
        return False
    args, kwargs = pytree.tree_map(lambda item: previous if item is cell else item, (tuple(args), dict(kwargs)))
    cells = defer_function(function, (previous, *args), kwargs, device)
    if cells is None or len(cells) != 1 or (cells[0].like.dtype, cells[0].like.shape) != (cell.like.dtype, cell.like.shape):
        return False
    assert cells[0].step is not None
    cell.write(cells[0].step)
    return True


def _function_of(func: Any) -> Any:
    """Return the functional form of an in-place operator: `aten.div.Tensor` for `aten.div_.Tensor`. None if it has none."""
    namespace, _, name = func._schema.name.partition("::")
    written = [i for i, argument in enumerate(func._schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    if namespace != "aten" or not name.endswith("_") or written != [0]:
        return None
    return getattr(getattr(aten, name[:-1], None), func._overloadname, None)


def _is_function(func: Any, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether an operator is pure, returns new tensors, and stays on the device of the deferred tensor."""
    tensors = all(str(result.type) == "Tensor" for result in func._schema.returns)
    impure = any(tag in func.tags for tag in IMPURE) and func is not aten.index.Tensor  # for mask indices, `_result_metas` fails
    pure = not func._schema.is_mutable and not impure
    return tensors and pure and kwargs.get("device") in (None, device)


def _is_dense(item: Any) -> bool:
    return isinstance(item, Tensor)


def _small_copy(tensor: Tensor, max_numel: int) -> Tensor | None:
    """Return a copy of a small operand that keeps its expanded dimensions; None if it is large or not a plain tensor."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    compact = compacted(tensor.detach())
    return compact.clone().expand(tensor.shape) if compact.numel() <= max_numel else None


def compacted(tensor: Tensor) -> Tensor:
    """Return the tensor with size 1 in expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and not stride else tensor
    return tensor


def _result_metas(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return meta tensors with the metadata of the results."""
    on_meta = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    args, kwargs = pytree.tree_map(_meta_operand, (tuple(args), dict(kwargs)))
    results = func(*args, **{**kwargs, **on_meta})
    return [results] if isinstance(results, Tensor) else list(results)


def _meta_operand(item: Any) -> Any:
    """Return a meta tensor for a cell or a tensor; a zero-dimensional tensor or another argument unchanged."""
    if isinstance(item, Cell):
        return meta_of(item.like)
    return meta_of(item) if isinstance(item, Tensor) and item.dim() else item


def meta_of(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the same sizes and strides."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
